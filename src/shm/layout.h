// What stands in the shared memory of each rank, and who may write it.
//
// Every rank owns one segment. Only the owner writes there, with these exceptions: the doorbell,
// the counters of rank 0's slots, which all ranks share, and Channel::num_read. All ranks issue the
// same pieces in the same order; piece number s (from 1) uses slot s % kSlots of every rank.
//
// A piece's life, on each rank:
//   posted   the record is written and the input may be read by others; slot.posted = s (release)
//   ready    posted by all ranks (acquire): the records are compared
//   done     either this rank has taken what it needs from the others ("pull"), or all chunks of
//            the piece have been reduced by whoever claimed them ("claim"): in place, or, of
//            kReduceOnce, into the output that all ranks share
//   retired  this rank needs nothing of the others' memory of this piece; control.retired = s
// Slot and staging memory of piece s may be used again once all ranks have retired s.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "collective/operation.h"
#include "collective/reduce.h"

namespace lockstep::shm {

using collective::DataType;
using collective::Kind;
using collective::kLine;
using collective::Reduction;
using collective::Signature;

constexpr std::uint64_t kShmMagic = 0x6c6f636b73746570;  // "lockstep"
constexpr std::uint32_t kShmVersion = 6;                 // of everything in this file

constexpr std::uint64_t kSlots = 64;       // pieces in flight
constexpr std::size_t kTinyBytes = 8;      // inputs up to this size travel in the slot
constexpr std::size_t kSmallBytes = 4096;  // up to this one in a small buffer
constexpr std::size_t kSmallBuffers = 32;
constexpr std::size_t kPieceBytes = 1 << 19;  // larger operations are cut into pieces
constexpr std::size_t kStagingPieces = 4;     // how many of them a rank has room for
constexpr std::size_t kMaxChunks = 64;        // of a piece: bits of Slot::claimed
constexpr std::size_t kMaxAreas = 1024;       // memory handed out for zero-copy operations
constexpr std::size_t kCauseBytes = 1024;

// What a rank says of a piece. All fields before `place` must be equal on all ranks.
struct Record {
  Signature signature;   // of the whole operation
  std::uint32_t piece;   // which piece of the operation
  std::uint32_t place;   // where the input is: one of the following, or an area
  std::uint64_t offset;  // in there
  double factor;         // of Reduction::kScaledSum
};
constexpr std::uint32_t kNowhere = 0xffffffff;  // this rank gives nothing, or not yet
constexpr std::uint32_t kInSlot = 0xfffffffe;
constexpr std::uint32_t kSmallBuffer = 0xfffffffd;
constexpr std::uint32_t kStaging = 0xfffffffc;
constexpr std::uint32_t kFirstThatIsNoArea = kStaging;

// The payload is on the record's cache line, so that a peer gets a tiny message with one transfer.
struct alignas(kLine) Slot {
  std::atomic<std::uint64_t> claimed{0};                  // rank 0's only: a bit per chunk
  alignas(kLine) std::atomic<std::uint32_t> num_done{0};  // rank 0's only: chunks
  alignas(kLine) std::atomic<std::uint64_t> posted{0};
  Record record;
  std::uint64_t retired;  // by this rank when it posted: saves the others a look at Control
  alignas(8) std::byte payload[kTinyBytes];
};
static_assert(sizeof(Slot) == 3 * kLine);

// Memory for zero-copy operations: a segment that peers attach when they first meet it.
struct Area {
  std::int32_t fd;
  std::uint64_t inode;
  std::uint64_t bytes;
  std::uint64_t address;
};

enum class RankState : std::uint32_t { kRunning, kFailed, kLeft };

struct alignas(kLine) Control {
  std::uint64_t magic;
  std::uint32_t version;
  alignas(kLine) std::atomic<std::uint32_t> doorbell{0};  // a futex; peers add 1 and wake
  std::atomic<std::uint32_t> is_asleep{0};
  alignas(kLine) std::atomic<std::uint64_t> retired{0};
  alignas(kLine) std::atomic<std::int32_t> waits_outside{0};  // 1 + the rank of another host, or 0
  std::atomic<std::uint64_t> claimed_bytes{0};  // memory that this rank is about to take
  alignas(kLine) std::atomic<RankState> state{RankState::kRunning};
  char cause[kCauseBytes];  // a Cause as a text; valid once state is kFailed
  alignas(kLine) std::array<Area, kMaxAreas> areas;  // written before a record names them
  std::atomic<std::uint64_t> channels{0};            // a bit for each rank with a Channel to it
  std::array<Slot, kSlots> slots;
  alignas(kLine) std::array<std::array<std::byte, kSmallBytes>, kSmallBuffers> small_buffers;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(collective::kMaxRanks <= 64);  // bits of Control::channels
static_assert(std::atomic<RankState>::is_always_lock_free);

// Messages from one rank to another: a ring of cells in the sender's segment. Its place is
// reserved, and becomes memory with the first message to that receiver, who has it mapped from the
// start: what is in there arrives, even if the sender is gone by then. A message takes as many
// cells in a row as it needs, at least one.
constexpr std::size_t kCellBytes = 16 << 10;
constexpr std::size_t kCells = 4;

struct alignas(kLine) Cell {
  std::uint64_t message_bytes;
  std::int32_t tag;
  std::uint32_t bytes;  // of the message in this cell
  alignas(kLine) std::byte data[kCellBytes];
};

struct alignas(kLine) Channel {
  alignas(kLine) std::atomic<std::uint64_t> num_written{0};  // cells; by the sender
  alignas(kLine) std::atomic<std::uint64_t> num_read{0};     // by the receiver
  std::array<Cell, kCells> cells;
};

// A segment: Control, staging memory, and places for the channels to all ranks.
constexpr std::size_t kStagingOffset = (sizeof(Control) + 4095) / 4096 * 4096;
constexpr std::size_t kSegmentBytes = kStagingOffset + kStagingPieces * kPieceBytes;
constexpr std::size_t kChannelBytes = (sizeof(Channel) + 4095) / 4096 * 4096;

constexpr std::size_t channel_offset(int receiver) {
  return kSegmentBytes + static_cast<std::size_t>(receiver) * kChannelBytes;
}

}  // namespace lockstep::shm
