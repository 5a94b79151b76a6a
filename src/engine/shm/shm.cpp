// The shared-memory engine: all ranks of one host, connected by a shm::Group.
//
// Work moves on in isCompleted() and wait(), on the caller's thread (runner_work.h): nothing runs
// behind the caller's back.

#include "base/text.h"
#include "engine/engines.h"
#include "engine/tensor_engine.h"

namespace lockstep {

std::shared_ptr<shm::Group> connect_by_memory(const EngineContext& context,
                                              std::function<std::string(int)> describe) {
  int round = 0;
  const shm::Exchange exchange = [&](const std::string& mine) {
    const std::string prefix = text::format("shm/{}/", round++);
    context.store->set(prefix + std::to_string(context.rank), mine);
    std::vector<std::string> keys;
    std::vector<std::string> all;
    for (int peer = 0; peer < context.size(); ++peer) keys.push_back(prefix + std::to_string(peer));
    context.store->wait(keys, context.connect_timeout);
    for (const std::string& key : keys) all.push_back(context.store->get_to_str(key));
    return all;
  };
  std::vector<int> global_ranks;
  for (const Member& member : context.members) global_ranks.push_back(member.rank);
  shm::GroupOptions options{.rank = context.rank,
                            .size = context.size(),
                            .timeout = context.timeout,
                            .global_ranks = std::move(global_ranks),
                            .describe = std::move(describe),
                            .channel = context.channel,
                            .has_ended = context.has_ended};
  // With other hosts a thread waits beside the one that computes; here the waiting one has the core
  // for itself, and polling for longer was faster (docs/design/0003).
  options.is_attended = options.describe != nullptr;
  if (!options.is_attended) {
    options.spin = std::chrono::milliseconds(2);
    options.gauges = Gauges::of_process();
  }
  return std::make_shared<shm::Group>(std::move(options), exchange);
}

Backend make_shm(const EngineContext& context) {
  const auto group = connect_by_memory(context, {});
  auto engine = c10::make_intrusive<TensorEngine>("shm", group, group);
  engine->set_context(context);
  return engine;
}

}  // namespace lockstep
