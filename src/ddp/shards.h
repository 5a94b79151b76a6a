// Shards: what the ranks of a host have once for a wrapped model (DdpOptions::shard): parameters,
// states of optimizers, and the gradients of the last backward.
//
// All of it is whole tensors in memory that every rank of the host maps, so that each can read all.
// Invariant: nobody writes there but between begin_update() and end_update(), which all ranks of
// the host enter and leave together; a piece has one writer. A rank that dies while it writes
// leaves a record in that memory (shm/claims.h): then nobody uses the model any more.
// Threading: the thread that trains.
#pragma once

#include <lockstep/ddp.h>
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "shm/claims.h"

namespace lockstep {

// A part of a tensor, as one run of memory.
struct TensorPiece {
  at::Tensor whole;  // its memory has no gaps
  std::int64_t first = 0;
  std::int64_t count = 0;

  // The same part of another tensor that lies as this one does.
  at::Tensor of(const at::Tensor& tensor) const;
};

class Shards : public std::enable_shared_from_this<Shards> {
 public:
  // A piece begins at a multiple of its size from the beginning of its tensor: what kernels do at
  // the end of a tensor, where elements do not fill a vector, then falls on the same elements as if
  // it were whole, and the bits are the same.
  static constexpr std::int64_t kPieceElements = 64 << 10;
  // A size of pieces, at most that, and not so small that a piece costs more than its work.
  static std::int64_t piece_for(std::int64_t num_elements);

  // Moves the parameters into shared memory. Collective on `world`. Throws: UsageError, on all
  // ranks, of parameters that cannot be moved.
  static std::shared_ptr<Shards> place(const World& world, const std::vector<NamedTensor>& trained,
                                       const std::vector<NamedTensor>& frozen);
  // The one that has this parameter; null if it is nobody's. Throws: UsageError if the wrapper has
  // gone.
  static std::shared_ptr<Shards> of(const at::Tensor& parameter);
  // The one whose memory this tensor is in, parameter or state; null if it is nobody's any more.
  static std::shared_ptr<Shards> holder_of(const at::Tensor& tensor);
  // Whether this rank does for the host what need be done once to such a tensor: each rank has
  // about as many bytes.
  bool is_mine(const at::Tensor& tensor) const;

  const World& host() const { return host_; }
  std::size_t size() const { return trained_.size(); }  // parameters that are trained
  const std::string& name_of(std::size_t slot) const { return trained_[slot].name; }
  std::optional<std::size_t> find(const at::Tensor& parameter) const;  // nothing: it is frozen
  std::size_t slot_of(const at::Tensor& parameter) const { return *find(parameter); }

  // A tensor like the parameter, of another type maybe, that all ranks share: each name is memory
  // for all parameters of a type. Zero at first. The first call for a name is collective on the
  // host.
  at::Tensor state(const std::string& name, std::size_t slot, at::ScalarType type);
  static constexpr const char* kMaster = "master";  // the name of master weights
  // Whether a tensor is what state() returns.
  bool is_state(const at::Tensor& tensor, const std::string& name, std::size_t slot,
                at::ScalarType type) const;

  // Whose states of a slot these are: the optimizer with that token. Null: there are none, or it is
  // gone.
  void set_keeper(std::size_t slot, const std::shared_ptr<int>& token) { keepers_[slot] = token; }
  std::shared_ptr<int> keeper_of(std::size_t slot) const;

  // The means of the last backward, by slot, that no step has used yet; undefined: there is none.
  void set_gradients(std::vector<at::Tensor> gradients);
  at::Tensor gradient(std::size_t slot) const {
    return gradients_.empty() ? at::Tensor() : gradients_[slot];
  }
  // A step has used these; another optimizer may have the rest.
  void drop_gradients(const std::vector<std::size_t>& slots);
  // Whether the gradients in .grad are this rank's own: a local backward was the last.
  void set_local(bool are_local) { are_local_ = are_local; }
  bool are_local() const { return are_local_; }
  bool has_unused_gradients() const { return !gradients_.empty() && !is_used_; }
  // The mean of a parameter that is nowhere else; undefined: there is none, or it is in .grad.
  static at::Tensor gradient_of(const at::Tensor& parameter);

  // What all ranks of a host do to gradients that they share, each to its part. Collective on the
  // hosts of `parameters`, for all that gradient_of() has. `change` gets parts, and may return a
  // number; the result is the largest one of all ranks, 0 without any.
  static double change_gradients(
      const std::vector<at::Tensor>& parameters,
      const std::function<double(const std::vector<at::Tensor>& parts)>& change);
  // Whether the ranks of each host that shares such gradients have the same number.
  static bool is_same_on_hosts(const std::vector<at::Tensor>& parameters, double number);
  // Of each such gradient, in the order of `parameters`, a number that one rank finds out.
  static std::vector<double> measure_gradients(
      const std::vector<at::Tensor>& parameters,
      const std::function<std::vector<double>(const std::vector<at::Tensor>& some)>& measure);

  static std::vector<TensorPiece> cut(const std::vector<at::Tensor>& tensors,
                                      std::int64_t piece = kPieceElements);

  // The ranks of the host meet, and agree on what is to be done: `lines` describe it, `hash` is of
  // them. From here on no rank uses the parameters for anything else. Throws, on all ranks: the
  // `failure` of one, that cannot go on; UsageError if parameters were written by others;
  // MismatchError with the lines that differ.
  void begin_update(std::size_t num_pieces, std::uint64_t hash,
                    const std::function<std::vector<std::string>()>& lines,
                    const std::exception_ptr& failure = nullptr);
  // Takes pieces until all are taken: `write(lane, piece)` on several threads.
  void run_update(const std::function<void(int lane, std::size_t piece)>& write);
  // All have ended. `failure` is this rank's: then all ranks throw, and what of `written`, which
  // are slots, was begun is torn. Autograd refuses graphs from before for them. Throws:
  // PeerLostError, TimeoutError that say what became of the parameters.
  void end_update(const std::exception_ptr& failure, const std::vector<std::size_t>& written);

  // The same for autograd, without the end: if is_completed_by_others().
  void note_updated(const std::vector<std::size_t>& written);
  // The last update ended by an error, and is complete all the same.
  bool is_completed_by_others() const { return is_completed_; }

  // Runs `change` on one rank of the host while the others wait. Collective on the host. Throws on
  // all what it throws.
  void change_parameters(const std::function<void()>& change);
  // These tensors were loaded, by all ranks of the host together. Each calls it. If all parameters
  // and all states of living optimizers are among them, they are torn no more; else they are if
  // they `were_torn`.
  void note_loaded(const std::vector<at::Tensor>& tensors, bool were_torn);
  // The text of an error if a parameter was written by others, or is not in shared memory any more.
  std::string find_foreign_change() const;
  // Throws: UsageError if the parameters are torn, or this is a forked child.
  void check_usable() const;
  // Whether a tensor is in memory that is torn, also if nobody has wrapped it any more.
  static bool is_torn(const at::Tensor& tensor);
  static void check_whole(const std::vector<NamedTensor>& tensors, int rank);  // throws UsageError
  [[noreturn]] static void throw_torn(int rank);
  bool is_torn() const { return record_->claims.is_torn(); }
  void set_torn(bool is_torn) { record_->claims.set_torn(is_torn); }

 private:
  struct Slot {
    std::string name;
    at::Tensor parameter;
    at::ScalarType type = at::kFloat;
    std::int64_t offset = 0;  // in the memory of its type
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
    std::uint64_t fingerprint = 0;
  };
  using Key = std::tuple<std::string, at::ScalarType, at::ScalarType>;  // name, parameters, its own
  struct Record {
    at::Tensor memory;
    shm::Claims claims;
  };

  static std::shared_ptr<Shards> find_same(const std::vector<NamedTensor>& trained,
                                           const std::vector<NamedTensor>& frozen);
  explicit Shards(World host) : host_(std::move(host)) {}
  void go_on_in(const World& host);
  bool is_at_place(const Slot& slot) const;
  void lay_out(const std::vector<NamedTensor>& trained, const std::vector<NamedTensor>& frozen);
  void make_record();
  void move_in();
  at::Tensor allocate(std::int64_t num_elements, at::ScalarType type);
  // The parameters are as they should be.
  void note_written();
  const at::Tensor& memory(const Key& key);
  static at::Tensor view(const at::Tensor& memory, const Slot& slot);
  // Three numbers of each rank of the host, by rank. As World::all_gather, in half the time.
  using Numbers = std::array<std::int64_t, 3>;
  std::vector<Numbers> gather(const Numbers& mine);
  [[noreturn]] void explain(std::exception_ptr error);
  std::string what_became();

  World host_;
  pid_t process_ = 0;
  std::vector<Slot> trained_;
  std::vector<Slot> frozen_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> slots_;
  std::map<at::ScalarType, std::int64_t> num_trained_;  // elements
  std::map<at::ScalarType, std::int64_t> num_all_;
  std::map<Key, at::Tensor> memory_;
  std::shared_ptr<Record> record_;  // who has the memory of a parameter has this, too
  at::Tensor said_ = {};            // gather(): this rank's
  at::Tensor heard_ = {};           // all ranks'
  std::size_t num_pieces_ = 0;
  std::uint64_t num_updates_ = 0;                      // begun
  std::map<std::size_t, std::weak_ptr<int>> keepers_;  // by slot
  std::vector<at::Tensor> gradients_;
  bool is_completed_ = false;
  bool is_used_ = false;  // some of them, by a step
  bool are_local_ = false;
};

}  // namespace lockstep
