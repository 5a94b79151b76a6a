// The hierarchical engine: shared memory inside each host, another engine between hosts.

#include <lockstep/error.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/text.h"
#include "engine/engines.h"
#include "engine/hierarchical/hierarchy.h"
#include "engine/tensor_engine.h"

namespace lockstep {
namespace {

EngineContext part_of_host(const EngineContext& context, const HostLayout& layout) {
  EngineContext part = context;
  part.channel.reset();  // the whole engine is on the board, not its parts
  part.rank = layout.my_index;
  part.members.clear();
  for (const int rank : layout.here()) {
    part.members.push_back(context.members[static_cast<std::size_t>(rank)]);
  }
  part.store =
      c10::make_intrusive<c10d::PrefixStore>(text::format("host{}", layout.host), context.store);
  return part;
}

}  // namespace

Backend make_hierarchical(const EngineContext& context, const std::string& between) {
  const HostLayout layout(context.rank, context.members);
  EngineContext across = context;
  across.channel.reset();
  across.store = c10::make_intrusive<c10d::PrefixStore>("between", context.store);
  const auto local =
      connect_by_memory(part_of_host(context, layout),
                        [members = context.members](int rank) { return describe(members, rank); });
  const auto hierarchy =
      std::make_shared<Hierarchy>(context, local, make_wire_engine(between, across));
  auto engine = c10::make_intrusive<TensorEngine>("hierarchical:" + between, hierarchy, local);
  engine->set_context(context);
  return engine;
}

}  // namespace lockstep
