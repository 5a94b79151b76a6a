// Group: the ranks of one host, connected by shared memory. All collectives on raw memory.
//
// Invariant: all ranks start the same operations in the same order; the first that differs is an
// error on all ranks. Results do not depend on timing: see reduce.h. No wait is without a deadline,
// and a rank that dies, leaves or fails ends the waiting of all others (layout.h, "A piece's
// life"). Threading: any thread may call; one mutex guards all state, and is free while a thread
// sleeps.
#pragma once

#include <array>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/process.h"
#include "shm/layout.h"
#include "shm/operation.h"
#include "shm/reduce.h"
#include "shm/runner.h"
#include "shm/segment.h"

namespace lockstep::shm {

struct GroupOptions {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // How long to look for news before sleeping; never longer than 50 us if there are fewer cores
  // than ranks.
  std::chrono::nanoseconds spin = std::chrono::microseconds(50);
  Simd simd = best_simd();
  std::vector<int> names = {};  // what messages call the ranks; empty: 0 to size - 1
  // With other hosts: what messages call a rank of any, by its name.
  std::function<std::string(int name)> describe = {};
};

// Gives every rank the texts of all ranks, in the order of ranks. Used while a group is made.
using Exchange = std::function<std::vector<std::string>(const std::string& mine)>;

class Group final : public Runner {
 public:
  // Collective. Throws SystemError (no room), MismatchError (another build of lockstep).
  Group(const GroupOptions& options, const Exchange& exchange);
  ~Group() override;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  std::shared_ptr<Request> start(Operation operation) override;

  // start() and wait() in one, without memory for what is under way: for calls that block.
  void run(const Operation& operation);

  // Moves all operations on, without doing more than this rank's share.
  bool poll(const Request& request) override;
  void wait(const Request& request, std::chrono::milliseconds timeout) override;
  void wait(const Request& request) override { wait(request, options_.timeout); }

  std::shared_ptr<Request> send(const std::byte* memory, std::size_t bytes, int peer,
                                int tag) override;
  std::shared_ptr<Request> receive(std::byte* memory, std::size_t bytes, int peer,
                                   int tag) override;

  // For one that waits elsewhere, for `what`: throws if a rank has failed, or has died before it
  // left.
  void look_around(const std::string& what);
  // Says that this rank waits for one outside the group, by its name; -1: for none any more. Those
  // who wait for this rank then let it say first that it has waited too long.
  void say_waiting_outside(int name) noexcept { self().waits_outside.store(name + 1); }
  // Ends the group with `error`, which the others are told. Waiting threads throw it, too.
  void give_up(std::exception_ptr error) noexcept;

  // Tells the others that this rank takes no further part; the destructor does, too.
  void leave() noexcept;

  // Memory that others reach: operations on it move no bytes but the result. Freed memory is kept
  // for the next allocation.
  std::byte* allocate(std::size_t bytes);
  void release(std::byte* memory) noexcept;

 private:
  struct Piece {
    std::shared_ptr<Request> request;
    const Operation* operation = nullptr;  // the request's
    std::uint64_t number = 0;
    std::size_t first = 0;  // element of each part
    std::size_t count = 0;
    int num_seen = 0;  // ranks below this have posted
    bool is_ready = false;
    bool is_claimed = false;  // reduced in place, by chunks
    bool is_done = false;
    std::size_t num_chunks = 0;
    std::size_t chunk_elements = 0;
    std::uint64_t my_claims = 0;  // chunks that need no second look
  };
  // A message that arrives: the part that has come so far.
  struct Arriving {
    int from = 0;
    int tag = 0;
    std::size_t message_bytes = 0;
    std::vector<std::byte> data;
  };
  struct OwnArea {
    Segment segment;
    std::uint32_t index;
    bool is_free;
  };

  void connect(const Exchange& exchange);
  int name(int rank) const {
    return options_.names.empty() || rank < 0 ? rank
                                              : options_.names[static_cast<std::size_t>(rank)];
  }
  Control& control(int rank) const { return *controls_[static_cast<std::size_t>(rank)]; }
  Control& self() const { return control(options_.rank); }
  Slot& slot(int rank, std::uint64_t number) const { return control(rank).slots[number % kSlots]; }

  std::uint64_t num_pieces(const Operation& operation) const;
  std::size_t elements_per_piece(const Operation& operation) const;
  int num_input_parts(const Operation& operation) const;

  void wait_locked(std::unique_lock<std::mutex>& lock, const Request& request,
                   std::chrono::milliseconds timeout);

  // Returns whether anything moved.
  bool progress(bool is_waiting);
  bool post_next();
  bool post(const Operation& operation, std::uint64_t index, Piece& piece);
  bool run_at_once(Piece& piece);
  bool place_input(const Operation& operation, Piece& piece, Slot& mine);
  void copy_input(const Operation& operation, const Piece& piece, std::byte* target) const;
  bool advance(Piece& piece, bool is_waiting);
  bool have_all_posted(Piece& piece);
  void make_ready(Piece& piece);
  void pull(Piece& piece);
  bool reduce_chunks(Piece& piece, bool is_waiting);
  void finish(Piece& piece);
  void retire();
  std::byte* input_of(int rank, const Piece& piece, int part);
  std::byte* attach_area(int rank, std::uint32_t index);
  std::uint64_t min_retired();
  bool is_done(const Request& request);
  void ring_all();

  Channel& channel(int from, int to) const;
  std::shared_ptr<Request> start_mail(Request request);
  bool has_mail() const { return !outgoing_.empty() || !expected_.empty(); }
  bool move_mail();
  bool move_outgoing(Request& request);
  bool move_incoming(int peer);
  void deliver(Request& request, int from, const std::byte* data, std::size_t bytes);
  std::shared_ptr<Request> take_expected(int from, int tag);
  std::string text_of_mail(const Request& request) const;
  void check_mail_peer(const Request& request);

  void check_peers(std::uint64_t number);
  void check_peer(int peer, const std::string& what);
  std::string describe(int peer) const;
  std::vector<int> missing_ranks() const;
  void time_out(const Request& request, std::chrono::milliseconds timeout,
                std::chrono::nanoseconds waited);
  [[noreturn]] void fail(std::exception_ptr error);
  void remember(std::exception_ptr error);
  void throw_if_failed() const;

  // Constant after construction.
  GroupOptions options_;
  std::vector<Segment> segments_;  // by rank
  std::vector<Control*> controls_;
  std::vector<ProcessId> processes_;
  int num_looks_ = 1;  // before a rank that waits offers its core to others

  // Guarded by mutex_.
  std::mutex mutex_;
  std::deque<std::shared_ptr<Request>> waiting_;  // with pieces that are not posted
  std::deque<Piece> active_;                      // posted and not retired, in order
  std::uint64_t num_posted_ = 0;
  std::uint64_t num_retired_ = 0;
  std::uint64_t min_retired_ = 0;  // a lower bound of all ranks'
  std::uint64_t num_staged_ = 0;
  std::array<std::uint64_t, kSmallBuffers> small_users_{};  // the piece that last used each
  std::vector<std::uint64_t> staging_users_;                // the piece that last used each place
  std::vector<OwnArea> own_areas_;
  std::vector<std::map<std::uint32_t, Segment>> peer_areas_;  // by rank
  std::deque<std::shared_ptr<Request>> outgoing_;
  std::deque<std::shared_ptr<Request>> expected_;  // receives that no message has come for
  std::vector<Arriving> arriving_;                 // by sender: the message under way
  std::deque<Arriving> unexpected_;                // complete, in the order of arrival
  std::exception_ptr failure_;
  bool has_left_ = false;
};

}  // namespace lockstep::shm
