#include "engine/mpi/traffic.h"

#include <algorithm>
#include <array>
#include <climits>
#include <set>
#include <thread>
#include <utility>

#include "base/text.h"

namespace lockstep {
namespace {

// A message of any length: MPI itself counts in int.
class Bytes {
 public:
  explicit Bytes(std::size_t bytes) : count_(static_cast<int>(bytes)) {
    if (bytes <= INT_MAX) return;
    constexpr std::size_t kBlock = 1 << 20;
    std::array<int, 2> counts = {static_cast<int>(bytes / kBlock),
                                 static_cast<int>(bytes % kBlock)};
    std::array<MPI_Aint, 2> offsets = {0, static_cast<MPI_Aint>(bytes / kBlock * kBlock)};
    std::array<MPI_Datatype, 2> types = {MPI_DATATYPE_NULL, MPI_BYTE};
    MPI_Type_contiguous(static_cast<int>(kBlock), MPI_BYTE, types.data());
    MPI_Type_create_struct(2, counts.data(), offsets.data(), types.data(), &type_);
    MPI_Type_commit(&type_);
    MPI_Type_free(types.data());
    count_ = 1;
  }
  ~Bytes() {
    if (type_ != MPI_BYTE) MPI_Type_free(&type_);  // messages under way keep it
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  int count_;
  MPI_Datatype type_ = MPI_BYTE;
};

void check(int code, int peer, const std::shared_ptr<MpiMessage>& message = nullptr) {
  if (code != MPI_SUCCESS) throw MpiProblem(peer, message, mpi::text_of(code));
}

}  // namespace

MpiTraffic::MpiTraffic(mpi::Communicator operations, mpi::Communicator messages)
    : operations_(std::move(operations)),
      messages_(std::move(messages)),
      incoming_(static_cast<std::size_t>(operations_.size())),
      outgoing_(incoming_.size()) {}

void MpiTraffic::send(Span span, int peer, int tag) {
  if (span.bytes == 0) return;
  const mpi::Calls calls;
  const Bytes bytes(span.bytes);
  Transfer transfer{.peer = peer};
  check(MPI_Isend(span.data, bytes.count(), bytes.type(), peer, tag, operations_.get(),
                  &transfer.handle),
        peer);
  transfers_.push_back(transfer);
}

void MpiTraffic::receive(Span span, int peer, int tag) {
  if (span.bytes == 0) return;
  const mpi::Calls calls;
  const Bytes bytes(span.bytes);
  Transfer transfer{.peer = peer, .is_receive = true};
  check(MPI_Irecv(span.data, bytes.count(), bytes.type(), peer, tag, operations_.get(),
                  &transfer.handle),
        peer);
  transfers_.push_back(transfer);
}

void MpiTraffic::post(std::shared_ptr<MpiMessage> request) {
  const collective::Message& message = request->message;
  Pending pending{.request = request, .peer = message.peer};
  if (message.is_send) {
    const mpi::Calls calls;
    const Bytes bytes(message.bytes);
    check(MPI_Isend(message.memory, bytes.count(), bytes.type(), message.peer, message.tag,
                    messages_.get(), &pending.handle),
          message.peer, request);
  }
  pending_.push_back(std::move(pending));
}

bool MpiTraffic::move() {
  const mpi::Calls calls;
  for (Transfer& transfer : transfers_) {
    int is_done = 0;
    check(MPI_Test(&transfer.handle, &is_done, MPI_STATUS_IGNORE), transfer.peer);
  }
  std::erase_if(transfers_,
                [](const Transfer& transfer) { return transfer.handle == MPI_REQUEST_NULL; });
  move_messages();
  if (transfers_.empty() && pending_.empty()) {
    // What this rank has sent may still need MPI to be called.
    int is_there = 0;
    check(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, operations_.get(), &is_there, MPI_STATUS_IGNORE),
          -1);
  }
  return transfers_.empty();
}

void MpiTraffic::move_messages() {
  // A message may arrive in the middle of this: it is for the first that waits for its like, not
  // for a later one.
  std::vector<const Pending*> waiting;
  for (Pending& pending : pending_) {
    const auto is_before = [&](const Pending* first) {
      return first->request->message.tag == pending.request->message.tag &&
             (first->peer == pending.peer || first->peer == collective::kAnyRank ||
              pending.peer == collective::kAnyRank);
    };
    if (pending.handle == MPI_REQUEST_NULL && std::ranges::none_of(waiting, is_before)) {
      fetch(pending);
    }
    if (pending.handle == MPI_REQUEST_NULL) {
      waiting.push_back(&pending);
      continue;
    }
    int is_done = 0;
    check(MPI_Test(&pending.handle, &is_done, MPI_STATUS_IGNORE), pending.peer, pending.request);
    if (is_done != 0) delivered_.push_back({std::move(pending.request), pending.peer});
  }
  std::erase_if(pending_, [](const Pending& pending) { return pending.request == nullptr; });
}

// Takes a message only when it is there and has the right size: some MPIs abort on one that is too
// long, and what has not been asked for needs no taking back.
void MpiTraffic::fetch(Pending& pending) {
  const collective::Message& wanted = pending.request->message;
  const int from = pending.peer == collective::kAnyRank ? MPI_ANY_SOURCE : pending.peer;
  int is_there = 0;
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status;
  check(MPI_Improbe(from, wanted.tag, messages_.get(), &is_there, &message, &status), pending.peer,
        pending.request);
  if (is_there == 0) return;
  MPI_Count size = 0;
  MPI_Get_elements_x(&status, MPI_BYTE, &size);
  pending.peer = status.MPI_SOURCE;
  if (static_cast<std::size_t>(size) != wanted.bytes) {
    MpiProblem problem(pending.peer, pending.request, text::format("a message of {} bytes", size));
    problem.has_wrong_size = true;
    throw problem;
  }
  const Bytes bytes(wanted.bytes);
  check(MPI_Imrecv(wanted.memory, bytes.count(), bytes.type(), &message, &pending.handle),
        pending.peer, pending.request);
}

std::vector<int> MpiTraffic::missing() const {
  std::set<int> peers;
  for (const Transfer& transfer : transfers_) peers.insert(transfer.peer);
  return {peers.begin(), peers.end()};
}

std::vector<MpiTraffic::Delivery> MpiTraffic::take_delivered() {
  return std::exchange(delivered_, {});
}

std::byte* MpiTraffic::scratch(std::size_t bytes) {
  if (scratch_.size() < bytes) scratch_ = std::vector<std::byte>(bytes);
  return scratch_.data();
}

void MpiTraffic::keep_communicators() noexcept {
  operations_.release();
  messages_.release();
}

bool MpiTraffic::cancel() {
  if (!mpi::is_running()) return false;
  constexpr int kLooks = 20;
  for (int look = 0; look < kLooks; ++look) {
    bool is_clear = true;
    const auto end = [&](MPI_Request& handle, bool is_receive) {
      if (handle == MPI_REQUEST_NULL) return;
      int is_done = 0;
      if (look == 0 && is_receive) MPI_Cancel(&handle);
      MPI_Test(&handle, &is_done, MPI_STATUS_IGNORE);
      is_clear = is_clear && is_done != 0;
    };
    {
      const mpi::Calls calls;
      for (Transfer& transfer : transfers_) end(transfer.handle, transfer.is_receive);
      for (Pending& pending : pending_) end(pending.handle, false);
    }
    if (is_clear) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

}  // namespace lockstep
