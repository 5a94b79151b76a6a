// Sharing: a wrapped model whose ranks do not all keep all of it (DdpOptions::shard). On a host
// they share memory (shards.h); on devices each keeps its slices (slices.h). What both have: the
// ranks, the parameters by number, the means that .grad does not have, and the agreement before a
// step.
//
// Threading: the thread that trains.
#pragma once

#include <lockstep/ddp.h>

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/cause.h"

namespace lockstep {

class Sharing : public std::enable_shared_from_this<Sharing> {
 public:
  // The one that has this parameter; null if it is nobody's. Throws: UsageError if it is in memory
  // that the ranks of a host share, and the wrapper has gone.
  static std::shared_ptr<Sharing> of(const at::Tensor& parameter);

  Sharing(const Sharing&) = delete;
  Sharing& operator=(const Sharing&) = delete;
  virtual ~Sharing() = default;

  const World& ranks() const { return ranks_; }       // that share
  std::size_t size() const { return names_.size(); }  // parameters that are trained: slots
  const std::string& name_of(std::size_t slot) const { return names_[slot]; }
  std::optional<std::size_t> find(const at::Tensor& parameter) const;  // nothing: it is frozen
  std::size_t slot_of(const at::Tensor& parameter) const { return *find(parameter); }

  // Whose states of a slot these are: the optimizer with that token. Null: there are none, or it is
  // gone.
  void set_keeper(std::size_t slot, const std::shared_ptr<int>& token) { keepers_[slot] = token; }
  std::shared_ptr<int> keeper_of(std::size_t slot) const;

  // With Shard::kGradients: the means of the last backward, by slot, that no step has used yet;
  // undefined: there is none. Of slices, what this rank has of them, in one dimension.
  void set_gradients(std::vector<at::Tensor> gradients);
  at::Tensor gradient(std::size_t slot) const {
    return gradients_.empty() ? at::Tensor() : gradients_[slot];
  }
  // A step has used these; another optimizer may have the rest.
  void drop_gradients(const std::vector<std::size_t>& slots);
  bool has_unused_gradients() const { return !gradients_.empty() && !is_used_; }
  // Whether the gradients in .grad are this rank's own: a local backward was the last.
  void set_local(bool are_local) { are_local_ = are_local; }
  bool are_local() const { return are_local_; }

  // Why the model must not be used as it is: the text of an error.
  virtual std::string find_foreign_change() const = 0;

 protected:
  explicit Sharing(World ranks) : ranks_(std::move(ranks)) {}

  void add_slot(const std::string& name, const at::Tensor& parameter);

  // All ranks come to the next update, and agree on what is to be done: `lines` describe it, `hash`
  // is of them. Throws, on all ranks: the `failure` of one that cannot go on; UsageError if one has
  // a find_foreign_change(); MismatchError with the lines that differ.
  void agree(std::uint64_t hash, const std::function<std::vector<std::string>()>& lines,
             const std::exception_ptr& failure);
  // From now on in another world of the same ranks: the engine of before may have failed, and
  // ranks may have begun different numbers of updates. Collective.
  void go_on_in(const World& ranks);
  // Three numbers of each rank, by rank. As World::all_gather, in half the time.
  using Numbers = std::array<std::int64_t, 3>;
  std::vector<Numbers> gather(const Numbers& mine);
  // A rank was lost in gather(). Throws.
  [[noreturn]] virtual void explain(std::exception_ptr error) = 0;

  World ranks_;
  std::uint64_t num_updates_ = 0;  // begun

 private:
  std::vector<std::string> names_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> slots_;
  std::map<std::size_t, std::weak_ptr<int>> keepers_;  // by slot
  std::vector<at::Tensor> gradients_;
  bool is_used_ = false;  // some of them, by a step
  bool are_local_ = false;
  at::Tensor said_ = {};   // gather(): this rank's
  at::Tensor heard_ = {};  // all ranks'
};

// Whether the same processes are in both, in the same order.
bool has_same_members(const World& a, const World& b);

// Memory of tensors, to find those that share some.
class TakenMemory {
 public:
  // Whether a part of it is another tensor's already. Tensors with gaps are not looked at.
  bool take(const at::Tensor& tensor);

 private:
  std::map<const std::byte*, const std::byte*> taken_;  // from, to
};

// The mean of a parameter that is nowhere else (Shard::kGradients), as Sharing::gradient();
// undefined: there is none, or it is in .grad.
at::Tensor shared_gradient_of(const at::Tensor& parameter);

// What ranks do to such gradients, each to its part. Collective on the ranks that share
// `parameters`, for all that shared_gradient_of() has. `change` gets parts, and may return a
// number; the result is the largest one of all ranks, 0 without any.
double change_shared_gradients(
    const std::vector<at::Tensor>& parameters,
    const std::function<double(const std::vector<at::Tensor>& parts)>& change);
// Of each such gradient, in the order of `parameters`, its norm. In the memory of a host one rank
// finds it out, by `norms_of`, with the bits that it has without sharing; of slices, squares are
// added up over ranks.
std::vector<double> norms_of_shared_gradients(
    const std::vector<at::Tensor>& parameters,
    const std::function<std::vector<double>(const std::vector<at::Tensor>& some)>& norms_of);
// Whether the ranks that share such gradients have the same number.
bool is_same_where_shared(const std::vector<at::Tensor>& parameters, double number);

}  // namespace lockstep
