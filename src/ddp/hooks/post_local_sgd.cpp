// Post-local SGD: the mean over all ranks in the first steps, then over the ranks of a part, or of
// nobody.

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>

#include "base/text.h"
#include "ddp/hooks/comm_hooks.h"

namespace lockstep {
namespace {

// The first rank of this rank's host: ranks of a host have it in common.
int first_on_host(const World& world) {
  const std::vector<Member>& members = world.members();
  const std::string& mine = members[static_cast<std::size_t>(world.rank())].host_id;
  const auto first = std::ranges::find(members, mine, &Member::host_id);
  return static_cast<int>(first - members.begin());
}

std::string join_ranks(const at::Tensor& ranks) {
  const auto* const first = ranks.const_data_ptr<int>();
  return text::join(std::vector<int>(first, first + ranks.numel()), ", ");
}

// Parts have ranks of the model only, and all ranks of one say the same of it. All ranks look at
// the same lists, so all throw, or none.
void check_parts(const World& world, const World& part) {
  std::vector<int> mine;
  for (int rank = 0; rank < part.size(); ++rank) mine.push_back(part.global_rank(rank));
  const auto all = world.all_gather_uneven(at::tensor(mine, at::TensorOptions(at::kInt)));
  const auto refuse = [&](int rank, const std::string& what) {
    throw UsageError({.rank = world.global_rank(),
                      .peer = rank == world.rank() ? -1 : world.global_rank(rank),
                      .operation = "post_local_sgd_hook"},
                     text::format("PostLocalSgdOptions::part of rank {} has ranks {}, {}.\nGive "
                                  "each rank its part of one split() of the model's world.",
                                  world.global_rank(rank),
                                  join_ranks(all[static_cast<std::size_t>(rank)]), what));
  };
  for (int rank = 0; rank < world.size(); ++rank) {
    const at::Tensor& its = all[static_cast<std::size_t>(rank)];
    for (std::int64_t i = 0; i < its.numel(); ++i) {
      const int global = its.const_data_ptr<int>()[i];
      int other = 0;
      while (other < world.size() && world.global_rank(other) != global) ++other;
      if (other == world.size()) {
        refuse(rank, text::format("of which {} does not train this model", global));
      }
      const at::Tensor& theirs = all[static_cast<std::size_t>(other)];
      if (!theirs.equal(its)) {
        refuse(rank, text::format("and that of rank {} has ranks {}", global, join_ranks(theirs)));
      }
    }
  }
}

class PostLocalSgdHook : public CommHook {
 public:
  explicit PostLocalSgdHook(const PostLocalSgdOptions& options) : options_(options) {
    if (options_.start_step >= 0) return;
    throw UsageError({.operation = "post_local_sgd_hook"},
                     text::format("PostLocalSgdOptions::start_step is {}.\nGive 0 or more: the "
                                  "number of steps whose gradients are averaged.",
                                  options_.start_step));
  }

  std::string text() const override {
    return text::format("post_local_sgd(start_step={}, averages in {})", options_.start_step,
                        !options_.averages_in_part ? "no part"
                        : options_.part            ? "a given part"
                                                   : "each host");
  }

  void begin(const World& world) override {
    part_.reset();
    is_whole_ = false;
    if (!options_.averages_in_part) return;
    if (options_.part) check_parts(world, *options_.part);
    const int size = options_.part ? options_.part->size() : world.local_size();
    is_whole_ = size == world.size();
    if (is_whole_) return;
    // The program may use its part for other things, in an order of its own.
    part_ = options_.part ? options_.part->duplicate("the part of a post_local_sgd_hook")
                          : world.split(first_on_host(world), 0, "a host of post_local_sgd_hook");
  }

  bool is_local() const override { return num_steps_ >= options_.start_step && !is_whole_; }
  bool may_be_local() const override { return !is_whole_; }
  std::optional<World> part() const override { return is_local() ? part_ : std::nullopt; }

  std::function<void()> start(GradBucket bucket, HookComm& comm) override {
    if (is_local() && !part_) return [] {};
    return start_mean(bucket.flat, comm);
  }

  void end_step() override { ++num_steps_; }

  HookState state() const override {
    return {{kNumSteps, at::scalar_tensor(num_steps_, at::kLong)}};
  }

  void load_state(const HookState& state, int /*epoch*/) override {
    const auto found = state.find(kNumSteps);
    num_steps_ = found == state.end() ? 0 : found->second.item<std::int64_t>();
  }

 private:
  static constexpr const char* kNumSteps = "num_steps";

  const PostLocalSgdOptions options_;
  std::optional<World> part_;  // none: of all ranks, or of nobody
  bool is_whole_ = false;      // the part is the world
  std::int64_t num_steps_ = 0;
};

}  // namespace

std::shared_ptr<CommHook> post_local_sgd_hook(const PostLocalSgdOptions& options) {
  return std::make_shared<PostLocalSgdHook>(options);
}

}  // namespace lockstep
