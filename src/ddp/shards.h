// Shards: what the ranks of a host have once for a wrapped model (DdpOptions::shard): parameters,
// states of optimizers, and the gradients of the last backward.
//
// All of it is whole tensors in memory that every rank of the host maps, so that each can read all.
// Invariant: nobody writes there but between begin_update() and end_update(), which all ranks of
// the host enter and leave together; a piece has one writer. A rank that dies while it writes
// leaves a record in that memory (shm/claims.h): then nobody uses the model any more.
// Threading: the thread that trains.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "ddp/sharing.h"
#include "shm/claims.h"
#include "shm/journal.h"

namespace lockstep {

// A part of a tensor, as one run of memory.
struct TensorPiece {
  at::Tensor whole;  // its memory has no gaps
  std::int64_t first = 0;
  std::int64_t count = 0;

  // The same part of another tensor that lies as this one does.
  at::Tensor of(const at::Tensor& tensor) const;
};

class Shards final : public Sharing {
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
  // As Sharing::of(), null also if it is on a device.
  static std::shared_ptr<Shards> of(const at::Tensor& parameter) {
    return std::dynamic_pointer_cast<Shards>(Sharing::of(parameter));
  }
  // Whether a tensor is in memory that the ranks of a host share.
  static bool is_placed(const at::Tensor& tensor);
  // The one whose memory this tensor is in, parameter or state; null if it is nobody's any more.
  static std::shared_ptr<Shards> holder_of(const at::Tensor& tensor);
  // Whether this rank does for the host what need be done once to such a tensor: each rank has
  // about as many bytes.
  bool is_mine(const at::Tensor& tensor) const;

  const World& host() const { return ranks(); }

  // A tensor like the parameter, of another type maybe, that all ranks share: each name is memory
  // for all parameters of a type. Zero at first. The first call for a name is collective on the
  // host.
  at::Tensor state(const std::string& name, std::size_t slot, at::ScalarType type);
  static constexpr const char* kMaster = "master";  // the name of master weights
  // Whether a tensor is what state() returns.
  bool is_state(const at::Tensor& tensor, const std::string& name, std::size_t slot,
                at::ScalarType type) const;

  static std::vector<TensorPiece> cut(const std::vector<at::Tensor>& tensors,
                                      std::int64_t piece = kPieceElements);

  // The ranks of the host meet, and agree on what is to be done: `lines` describe it, `hash` is of
  // them. From here on no rank uses the parameters for anything else. Throws, on all ranks: the
  // `failure` of one, that cannot go on; UsageError if parameters were written by others;
  // MismatchError with the lines that differ.
  void begin_update(std::size_t num_pieces, std::uint64_t hash,
                    const std::function<std::vector<std::string>()>& lines,
                    const std::exception_ptr& failure = nullptr);
  // How a piece is written, and which memory it has.
  struct Writing {
    std::function<void(int lane, std::size_t piece)> write;
    std::function<shm::Journal::Runs(std::size_t piece)> runs;
  };
  // In an elastic job, what a lost rank has begun is done again by another: from now on pieces, of
  // so many bytes at most, are kept until they are written. Collective on the host if they are more
  // or larger than before.
  void keep_journal(std::size_t num_pieces, std::size_t piece_bytes);
  // Takes pieces until all are taken: writes on several threads.
  void run_update(const Writing& writing);
  // All have ended. `failure` is this rank's: then all ranks throw, and what of `written`, which
  // are slots, was begun is torn. Autograd refuses graphs from before for them. Throws:
  // PeerLostError, TimeoutError that say what became of the parameters.
  void end_update(const std::exception_ptr& failure, const std::vector<std::size_t>& written);

  // The same for autograd, without the end: if is_completed_by_others().
  void note_updated(const std::vector<std::size_t>& written);
  // The last update ended by an error, and is complete all the same.
  bool is_completed_by_others() const { return is_completed_; }
  // It is not, and can be completed: by one rank, while the others wait in the same call. All ranks
  // of the host that live call it.
  bool needs_repair() const { return needs_repair_; }
  void repair(const Writing& writing);

  // Runs `change` on one rank of the host while the others wait. Collective on the host. Throws on
  // all what it throws.
  void change_parameters(const std::function<void()>& change);
  // These tensors were loaded, by all ranks of the host together. Each calls it. If all parameters
  // and all states of living optimizers are among them, they are torn no more; else they are if
  // they `were_torn`.
  void note_loaded(const std::vector<at::Tensor>& tensors, bool were_torn);
  // A parameter was written by others, or is not in shared memory any more.
  std::string find_foreign_change() const override;
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
  explicit Shards(World host) : Sharing(std::move(host)) {}
  bool is_at_place(const Slot& slot) const;
  void lay_out(const std::vector<NamedTensor>& trained, const std::vector<NamedTensor>& frozen);
  void make_record();
  void move_in();
  at::Tensor allocate(std::int64_t num_elements, at::ScalarType type);
  // The parameters are as they should be.
  void note_written();
  const at::Tensor& memory(const Key& key);
  static at::Tensor view(const at::Tensor& memory, const Slot& slot);
  [[noreturn]] void explain(std::exception_ptr error) override;
  std::string what_became();
  std::string look_into_journal();
  bool is_lost(int rank) const;
  bool is_living_writing() const;

  pid_t process_ = 0;
  std::vector<Slot> trained_;
  std::vector<Slot> frozen_;
  std::map<at::ScalarType, std::int64_t> num_trained_;  // elements
  std::map<at::ScalarType, std::int64_t> num_all_;
  std::map<Key, at::Tensor> memory_;
  std::shared_ptr<Record> record_;  // who has the memory of a parameter has this, too
  std::size_t num_pieces_ = 0;
  bool is_completed_ = false;
  bool needs_repair_ = false;
  bool is_by_pieces_ = true;  // the update under way is; if not, change_parameters() runs
  at::Tensor journal_memory_;
  std::optional<shm::Journal> journal_;  // in an elastic job
};

}  // namespace lockstep
