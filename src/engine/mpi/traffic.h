// MpiTraffic: the messages of one MPI engine that are under way, and the memory they use.
//
// The messages of operations and those of callers (send, recv) have a communicator each, so that
// tags of callers are free. Threading: one thread at a time, the runner's.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "collective/request.h"
#include "engine/mpi/calls.h"
#include "engine/mpi/plan.h"

namespace lockstep {

// What this runner needs to know of a request.
struct Abandonable {
  bool is_abandoned = false;  // nobody waits for it any more
};
struct MpiOperation : collective::OperationRequest, Abandonable {};
struct MpiMessage : collective::MessageRequest, Abandonable {};

// A message failed: one of the present operation, or a caller's.
struct MpiProblem : std::runtime_error {
  MpiProblem(int its_peer, std::shared_ptr<MpiMessage> its_message, const std::string& text)
      : std::runtime_error(text), peer(its_peer), message(std::move(its_message)) {}
  int peer;
  std::shared_ptr<MpiMessage> message;  // a caller's
  bool has_wrong_size = false;          // a caller's message
};

// What a rank says of a piece of an operation to another, with the bytes for it if they are few.
struct MpiHeader {
  collective::Signature signature;
  std::uint64_t number;  // of the operation
  std::uint64_t first;   // element of the piece
  std::uint64_t bytes;   // that the sender gives the receiver
  double factor;         // of Reduction::kScaledSum
  std::byte payload[MpiPlan::kSmallBytes];
};
static_assert(std::is_trivially_copyable_v<MpiHeader>);

class MpiTraffic {
 public:
  MpiTraffic(mpi::Communicator operations, mpi::Communicator messages);

  // Of the present piece.
  MpiHeader& header_from(int peer) { return incoming_[static_cast<std::size_t>(peer)]; }
  MpiHeader& header_to(int peer) { return outgoing_[static_cast<std::size_t>(peer)]; }

  // Begins a message of the present operation; an empty one is none.
  void send(Span span, int peer, int tag);
  void receive(Span span, int peer, int tag);
  // Begins a send or recv.
  void post(std::shared_ptr<MpiMessage> request);

  // Moves everything on. True if no message of the present operation is left.
  // Throws MpiProblem.
  bool move();
  // Ranks that the present operation waits for.
  std::vector<int> missing() const;
  bool has_messages() const { return !pending_.empty(); }
  // Messages of callers that have arrived or been sent since the last call, with the rank on the
  // other side.
  struct Delivery {
    std::shared_ptr<MpiMessage> request;
    int peer = 0;
  };
  std::vector<Delivery> take_delivered();

  // Memory for the present operation, which is kept until the next one asks for more.
  std::byte* scratch(std::size_t bytes);

  // Takes back what has not been received. False if messages are still under way: then this object,
  // with what callers gave for them, must stay for ever.
  bool cancel();
  // After an end that others may not have heard of.
  void keep_communicators() noexcept;

  // The operation whose memory the messages use.
  std::shared_ptr<MpiOperation> present;

 private:
  struct Transfer {
    MPI_Request handle = MPI_REQUEST_NULL;
    int peer = 0;
    bool is_receive = false;
  };
  struct Pending {
    MPI_Request handle = MPI_REQUEST_NULL;  // of a recv, once a message is there for it
    std::shared_ptr<MpiMessage> request;
    int peer = 0;
  };

  void move_messages();
  void fetch(Pending& pending);

  mpi::Communicator operations_;
  mpi::Communicator messages_;
  std::vector<Transfer> transfers_;  // of the present operation
  std::deque<Pending> pending_;      // callers' messages
  std::vector<Delivery> delivered_;
  std::vector<MpiHeader> incoming_;
  std::vector<MpiHeader> outgoing_;
  std::vector<std::byte> scratch_;
};

}  // namespace lockstep
