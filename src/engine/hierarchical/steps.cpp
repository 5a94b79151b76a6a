// What all operations have in common: the comparison of what ranks are at, the pipeline, and the
// single steps.

#include "engine/hierarchical/steps.h"

#include <algorithm>

#include "base/hash.h"

namespace lockstep {
namespace {

using collective::DataType;
using collective::Kind;
using collective::Operation;
using collective::Reduction;

// Each operation has two: what answers a message needs another, as receives are not in that order.
constexpr int kNumTags = (Wire::kFirstOwnTag - Wire::kFirstOperationTag) / 2;

// A slice is small enough that the first ones are on the wire soon, and large enough that messages
// cost little.
constexpr std::size_t kMaxSliceBytes = 1 << 20;
constexpr std::size_t kMinSliceBytes = 512 << 10;
constexpr std::size_t kChunksWanted = 4;

// Up to this size, over all other hosts, one step between the leaders is quicker than two between
// all ranks.
constexpr std::size_t kSmallBytes = 256 << 10;

// What is tiny is small: there are no more hosts than can be added up (choose.cpp).
static_assert(Leaders::kPayloadBytes * (collective::kMaxRanks - 1) <= kSmallBytes);

}  // namespace

void HostSteps::run(Operation operation, std::uint64_t number) {
  operation_ = std::move(operation);
  activity_ = operation_.activity();
  element_ = collective::size_of(operation_.type);
  header_ = {.number = number, .signature = operation_.signature()};
  // Ranks that are at different operations must not take each other's messages for their own: they
  // have different tags, and find out by their headers.
  tag_ = Wire::kFirstOperationTag +
         static_cast<int>(hash_bytes(&header_, sizeof header_) % kNumTags) * 2;
  wire_.begin_operation(operation_.timeout);
  compare_here();
  if (layout_.is_leader() && !is_tiny()) leaders_.tell(header_, nullptr, 0);
  if (operation_.count != 0) run_steps();
  hear_leaders();
  if (layout_.is_leader()) leaders_.end([this](Parcel& parcel) { wait(parcel); });
  if (operation_.kind == Kind::kBarrier) {
    local_.wait(*start_here(Kind::kBarrier, 0, 0, nullptr, nullptr));
  }
  operation_.owner.reset();
  local_.set_waiting_outside(-1);
}

void HostSteps::run_steps() {
  switch (operation_.kind) {
    case Kind::kBarrier:
      break;
    case Kind::kAllReduce:
      is_small() ? all_reduce_small() : all_reduce();
      break;
    case Kind::kReduce:
      reduce();
      break;
    case Kind::kBroadcast:
      is_small() ? broadcast_small() : broadcast();
      break;
    case Kind::kAllGather:
      is_tiny() ? all_gather_tiny() : all_gather();
      break;
    case Kind::kGather:
      gather();
      break;
    case Kind::kScatter:
      scatter();
      break;
    case Kind::kReduceScatter:
      reduce_scatter();
      break;
    case Kind::kAllToAll:
      all_to_all();
      break;
    case Kind::kReduceOnce:
      break;  // refused by start()
  }
}

void HostSteps::compare(int peer, const OperationHeader& theirs) const {
  if (theirs == header_) return;
  const int mine = layout_.global_rank(layout_.rank);
  const int other = layout_.global_rank(peer);
  // All ranks name the lower one first.
  if (peer < layout_.rank) {
    collective::throw_mismatch(mine, header_.number, other, theirs.signature, mine,
                               header_.signature);
  }
  collective::throw_mismatch(mine, header_.number, mine, header_.signature, other,
                             theirs.signature);
}

void HostSteps::compare_here() {
  if (layout_.num_here() == 1) return;
  std::vector<OperationHeader> all(layout_.here().size());
  Operation tell;
  tell.kind = Kind::kAllGather;
  tell.count = sizeof(OperationHeader);
  tell.input.base = reinterpret_cast<std::byte*>(&header_);
  tell.output = {.base = reinterpret_cast<std::byte*>(all.data()),
                 .stride = sizeof(OperationHeader)};
  tell.part_of = &operation_;
  local_.wait(*local_.start(std::move(tell)));
  // All ranks name the same two: the leader and the first that differs from it.
  const auto other =
      std::ranges::find_if(all, [&](const OperationHeader& one) { return one != all[0]; });
  if (other == all.end()) return;
  const int first = layout_.here().front();
  const int second = layout_.here()[static_cast<std::size_t>(other - all.begin())];
  compare(header_ == all[0] ? second : first, header_ == all[0] ? *other : all[0]);
}

// Whether what a host gives fits into the message that leaders exchange anyway.
bool HostSteps::is_tiny() const {
  const std::size_t bytes = operation_.count * element_;
  switch (operation_.kind) {
    case Kind::kAllReduce:
    case Kind::kBroadcast:
      return bytes != 0 && bytes <= Leaders::kPayloadBytes;
    case Kind::kAllGather:
      return bytes != 0 && bytes * layout_.largest_host() <= Leaders::kPayloadBytes;
    default:
      return false;
  }
}

// Does nothing if they have been heard in this operation.
void HostSteps::hear_leaders() {
  leaders_.hear([this](Parcel& parcel) { wait(parcel); },
                [this](int leader, const OperationHeader& theirs) { compare(leader, theirs); });
}

void HostSteps::exchange_tiny(const std::byte* payload, std::size_t bytes) {
  leaders_.tell(header_, payload, bytes);
  hear_leaders();
}

// Runs the three stages of each chunk of operation_.count elements.
void HostSteps::pipeline(std::size_t elements_per_chunk, const Stage& enter, const Stage& turn,
                         const Stage& leave) {
  const std::size_t count = operation_.count;
  const auto num_chunks = static_cast<int>((count + elements_per_chunk - 1) / elements_per_chunk);
  std::array<Chunk, kInFlight> chunks;
  for (int now = 0; now < num_chunks + 2; ++now) {
    const auto chunk = [&](int number) -> Chunk& {
      return chunks[static_cast<std::size_t>(number) % kInFlight];
    };
    if (now < num_chunks) {
      const std::size_t first = static_cast<std::size_t>(now) * elements_per_chunk;
      chunk(now) = {.number = now, .range = {first, std::min(elements_per_chunk, count - first)}};
      enter(chunk(now));
    }
    if (now >= 1 && now - 1 < num_chunks) turn(chunk(now - 1));
    if (now >= 2) {
      leave(chunk(now - 2));
      finish(chunk(now - 2));
    }
  }
}

void HostSteps::finish(Chunk& chunk) {
  wait(chunk.local);
  wait(chunk.in);
  wait(chunk.out);
}

// Elements of a chunk of which each of num_slices ranks has a slice. Whole cache lines.
std::size_t HostSteps::chunk_elements(int num_slices) const {
  const auto slices = static_cast<std::size_t>(num_slices);
  const std::size_t wanted = operation_.count * element_ / slices / kChunksWanted;
  const std::size_t slice = std::clamp(wanted, kMinSliceBytes, kMaxSliceBytes);
  return slice / collective::kLine * collective::kLine / element_ * slices;
}

// Elements of a chunk of each of all ranks' parts.
std::size_t HostSteps::chunk_elements_of_parts() const {
  const std::size_t bytes = kMaxSliceBytes / static_cast<std::size_t>(layout_.num_ranks());
  return std::max(bytes / collective::kLine, std::size_t{1}) * collective::kLine / element_;
}

// The part with that index. Whole cache lines, so that late ones may be empty.
HostSteps::Range HostSteps::part(Range whole, int index, int num_parts) const {
  const std::size_t line = collective::kLine / element_;
  const auto parts = static_cast<std::size_t>(num_parts);
  const std::size_t each = ((whole.count + parts - 1) / parts + line - 1) / line * line;
  const std::size_t begin = std::min(whole.count, each * static_cast<std::size_t>(index));
  return {whole.first + begin, std::min(each, whole.count - begin)};
}

void HostSteps::for_other_hosts(const std::function<void(int host, int teammate)>& f) const {
  for (int host = 0; host < layout_.num_hosts(); ++host) {
    if (host != layout_.host) f(host, layout_.helper(host, layout_.my_index));
  }
}

std::byte* HostSteps::scratch(std::size_t bytes) {
  if (scratch_bytes_ < bytes) {
    scratch_.reset();
    scratch_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    scratch_bytes_ = bytes;
  }
  return scratch_.get();
}

bool HostSteps::is_small() const {
  return operation_.count * element_ * (layout_.hosts.ranks.size() - 1) <= kSmallBytes;
}

// Averages are sums until all are added.
// An average is a sum that is divided at the end; in f16, whose range a sum may leave where the
// average does not, it is the average of hosts' averages, by their numbers of ranks.
bool HostSteps::averages_here() const {
  return operation_.reduction == Reduction::kAverage && operation_.type == DataType::kF16;
}

Reduction HostSteps::in_host() const {
  return operation_.reduction == Reduction::kAverage && !averages_here() ? Reduction::kSum
                                                                         : operation_.reduction;
}

// A rank alone on its host has its host's sum, unless it is to be scaled.
bool HostSteps::must_reduce_here() const {
  return layout_.num_here() > 1 || operation_.reduction == Reduction::kScaledSum;
}

Operation HostSteps::step_here(Kind kind, int root_index, std::size_t count) const {
  Operation step;
  step.kind = kind;
  step.type = operation_.type;
  step.reduction = kind == Kind::kReduce ? in_host() : Reduction::kNone;
  step.factor = operation_.factor;
  step.root = root_index;
  step.count = count;
  step.part_of = &operation_;
  return step;
}

HostSteps::LocalRequest HostSteps::start_here(Kind kind, int root_index, std::size_t count,
                                              const std::byte* input, std::byte* output) {
  Operation step = step_here(kind, root_index, count);
  step.input.base = const_cast<std::byte*>(input);
  step.output.base = output;
  return local_.start(std::move(step));
}

void HostSteps::send(Chunk& chunk, int peer, const std::byte* memory, std::size_t count) {
  if (count != 0)
    chunk.out.push_back(wire_.send(peer, memory, count * element_, tag_, shared_from_this()));
}

void HostSteps::receive(Chunk& chunk, int peer, std::byte* memory, std::size_t count) {
  if (count != 0)
    chunk.in.push_back(wire_.receive(peer, memory, count * element_, tag_, shared_from_this()));
}

void HostSteps::send_answer(Chunk& chunk, int peer, const std::byte* memory, std::size_t count) {
  if (count != 0)
    chunk.out.push_back(wire_.send(peer, memory, count * element_, tag_ + 1, shared_from_this()));
}

void HostSteps::receive_answer(Chunk& chunk, int peer, std::byte* memory, std::size_t count) {
  if (count != 0)
    chunk.answers.push_back(
        wire_.receive(peer, memory, count * element_, tag_ + 1, shared_from_this()));
}

void HostSteps::wait(std::vector<Parcel>& parcels) {
  if (!parcels.empty()) hear_leaders();
  for (Parcel& parcel : parcels) wait(parcel);
  parcels.clear();
}

void HostSteps::wait(Parcel& parcel) {
  local_.set_waiting_outside(
      layout_.global_rank(parcel.peer));  // until the operation ends: more will follow
  wire_.wait(parcel, activity_);
}

void HostSteps::wait(std::vector<LocalRequest>& requests) {
  for (const LocalRequest& request : requests) local_.wait(*request);
  requests.clear();
}

// The contributions of all hosts, in their order, become the result.
void HostSteps::sum_hosts(const std::vector<const void*>& inputs, std::byte* output,
                          std::size_t count) {
  const bool is_scaled = operation_.reduction == Reduction::kScaledSum;  // already, by the ranks
  std::vector<double> factors;
  if (averages_here()) {
    for (const auto& ranks : layout_.hosts.ranks) {
      factors.push_back(static_cast<double>(ranks.size()) / layout_.num_ranks());
    }
  }
  void* outputs[] = {output};
  collective::reduce({.type = operation_.type,
                      .reduction = averages_here() ? Reduction::kScaledSum
                                   : is_scaled     ? Reduction::kSum
                                                   : operation_.reduction,
                      .num_inputs = static_cast<int>(inputs.size()),
                      .inputs = inputs.data(),
                      .factors = factors.data(),
                      .num_outputs = 1,
                      .outputs = outputs,
                      .count = count,
                      .average_over = operation_.average_over != 0 ? operation_.average_over
                                                                   : layout_.num_ranks()},
                     simd_);
}

}  // namespace lockstep
