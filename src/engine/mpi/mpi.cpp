// The MPI engine: ranks that mpirun has started, or those of a communicator of the program's own.
//
// Ranks of the world may be in another order than MPI's, and only some of its processes: they tell
// each other through the store who they are there, and make a communicator of their own.

#include <lockstep/error.h>

#include <random>
#include <set>
#include <sstream>

#include "base/text.h"
#include "engine/engines.h"
#include "engine/mpi/runner.h"
#include "engine/tensor_engine.h"

namespace lockstep {
namespace {

constexpr int kTags = 16384;  // a pair of tags for each world; MPI has at least 32767

// Who this world's ranks are in `parent`, and a number that only this world has.
struct Roll {
  std::vector<int> ranks;
  int number = 0;
};

int global_rank(const EngineContext& context) {
  return context.members[static_cast<std::size_t>(context.rank)].rank;
}

Roll call_roll(const EngineContext& context, MPI_Comm parent) {
  int rank = 0;
  int size = 0;
  {
    const mpi::Calls calls;
    MPI_Comm_rank(parent, &rank);
    MPI_Comm_size(parent, &size);
  }
  const int number = static_cast<int>(std::random_device()() % kTags);
  std::vector<std::string> keys;
  for (int peer = 0; peer < context.size(); ++peer) keys.push_back(text::format("mpi/{}", peer));
  context.store->set(keys[static_cast<std::size_t>(context.rank)],
                     text::format("{} {} {}", rank, size, number));
  context.store->wait(keys, context.connect_timeout);
  Roll roll;
  for (const std::string& key : keys) {
    std::istringstream fields(context.store->get_to_str(key));
    int peer = 0;
    int its_number = 0;
    fields >> peer >> size >> its_number;
    if (roll.ranks.empty()) roll.number = its_number;
    roll.ranks.push_back(peer);
  }
  if (std::set<int>(roll.ranks.begin(), roll.ranks.end()).size() != roll.ranks.size()) {
    throw UsageError(
        {.rank = global_rank(context), .operation = "join"},
        text::format(
            "MPI does not know these {} ranks as different processes of one job: they are "
            "its ranks {} of {}.\nStart the program with mpirun, or choose another engine.",
            context.size(), text::join(roll.ranks, ", "), size));
  }
  return roll;
}

mpi::Communicator connect(const EngineContext& context, MPI_Comm parent, const Roll& roll,
                          int tag) {
  const mpi::Calls calls;
  const mpi::ErrorsReturn errors(parent);
  MPI_Group all = MPI_GROUP_NULL;
  MPI_Group members = MPI_GROUP_NULL;
  MPI_Comm handle = MPI_COMM_NULL;
  MPI_Comm_group(parent, &all);
  MPI_Group_incl(all, context.size(), roll.ranks.data(), &members);
  const int code = MPI_Comm_create_group(parent, members, tag, &handle);
  MPI_Group_free(&members);
  MPI_Group_free(&all);
  if (code != MPI_SUCCESS) {
    throw PeerLostError({.rank = global_rank(context), .operation = "join"},
                        text::format("MPI could not connect the ranks: {}.\n"
                                     "Look for the rank that failed first.",
                                     mpi::text_of(code)));
  }
  return mpi::Communicator(handle);
}

}  // namespace

std::string why_no_mpi() { return {}; }

// A program of one MPI under another's mpirun would be a world of one for its MPI.
bool has_started_ranks_by_mpi(const EngineContext& context) {
#ifdef OPEN_MPI
  constexpr const char* kLauncher = "OpenMPI";
#else
  constexpr const char* kLauncher = "PMI";
#endif
  return context.communicator != nullptr || context.launcher == kLauncher;
}

Backend make_mpi(const EngineContext& context) {
  mpi::initialize(global_rank(context));
  const auto* given = static_cast<const mpi::Communicator*>(context.communicator.get());
  const MPI_Comm parent = given != nullptr ? given->get() : MPI_COMM_WORLD;
  const Roll roll = call_roll(context, parent);
  auto operations = connect(context, parent, roll, 2 * roll.number);
  auto messages = connect(context, parent, roll, 2 * roll.number + 1);
  auto runner = std::make_shared<MpiRunner>(
      context, std::make_unique<MpiTraffic>(std::move(operations), std::move(messages)));
  return c10::make_intrusive<TensorEngine>("mpi", std::move(runner), nullptr);
}

}  // namespace lockstep
