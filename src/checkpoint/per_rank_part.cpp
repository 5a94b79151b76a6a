// Texts of which each rank has its own. All of them are saved, one behind the other, as the bytes
// of one tensor, so that they need not be UTF-8. A zero stands at the end.

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>
#include <numeric>

#include "archive/file.h"
#include "base/text.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/parts.h"
#include "world/exchange.h"

namespace lockstep {
namespace {

std::vector<std::string> cut(const at::Tensor& bytes, const std::vector<std::int64_t>& lengths) {
  std::vector<std::string> texts;
  const auto* at = static_cast<const char*>(bytes.const_data_ptr());
  for (const std::int64_t length : lengths) {
    texts.emplace_back(at, static_cast<std::size_t>(length));
    at += length;
  }
  return texts;
}

bool is_plausible(const std::vector<std::int64_t>& lengths) {
  std::int64_t total = 0;
  for (const std::int64_t length : lengths) {
    if (length < 0 || length > static_cast<std::int64_t>(kMaxSmallBytes) - total) return false;
    total += length;
  }
  return !lengths.empty();
}

void refuse_large_own(std::size_t bytes, const World& world, const std::string& name) {
  const std::size_t most = kMaxSmallBytes / static_cast<std::size_t>(world.size());
  if (bytes <= most) return;
  throw UsageError({.rank = world.global_rank(), .operation = "save"},
                   text::format("'{}' of this rank has {} bytes, more than {}: with {} ranks each "
                                "may have that much.\nWrite what is large to a file of each rank, "
                                "and save its name.",
                                name, bytes, most, world.size()));
}

}  // namespace

// Every rank comes, whatever has happened to it: a text begins with whether it is a failure.
std::vector<std::string> gather_texts(const World& world,
                                      const std::function<std::string()>& save) {
  std::string mine;
  try {
    mine = "+" + save();
  } catch (...) {
    mine = "-" + failure_text(std::current_exception(), world.global_rank());
  }
  std::vector<std::string> texts;
  std::vector<std::string> failures;
  for (const std::string& one : exchange_texts(world, mine)) {
    failures.push_back(one.starts_with('-') ? one.substr(1) : std::string());
    texts.push_back(one.substr(1));
  }
  throw_first_cause(world, failures, {.rank = world.global_rank(), .operation = "save"});
  return texts;
}

Part per_rank_part(const World& world, const std::string& name, std::function<std::string()> save,
                   LoadText load, LoadTexts load_others) {
  const std::string tensor_name = name + ".texts";
  const auto save_all = [world, name, tensor_name, save = std::move(save)](Snapshot& snapshot) {
    std::string all;
    Json lengths = Json::array();
    // Each rank checks its own before any rank is sent all of them.
    const auto save_mine = [&] {
      std::string mine = save();
      refuse_large_own(mine.size(), world, name);
      return mine;
    };
    for (const std::string& text : gather_texts(world, save_mine)) {
      all += text;
      lengths.push_back(text.size());
    }
    all += '\0';
    const at::Tensor bytes = at::empty({static_cast<std::int64_t>(all.size())}, at::kByte);
    std::ranges::copy(all, static_cast<char*>(bytes.mutable_data_ptr()));
    snapshot.tensors.push_back({tensor_name, bytes});
    snapshot.values[name] = {{"lengths", lengths}};
  };
  const auto load_all = [world, name, tensor_name, load = std::move(load),
                         load_others = std::move(load_others)](const Json& values) -> Wish {
    const auto lengths = values.at("lengths").get<std::vector<std::int64_t>>();
    if (!is_plausible(lengths)) {
      return {.differences = {text::format("{}: not as lockstep writes it", name)}};
    }
    const bool is_same_size = lengths.size() == static_cast<std::size_t>(world.size());
    if (!is_same_size && !load_others) {
      return {.differences = {text::format("{}: saved by {} ranks, here are {}: add_per_rank() "
                                           "needs its fourth argument for that",
                                           name, lengths.size(), world.size())}};
    }
    const std::int64_t total = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{1});
    const at::Tensor bytes = at::ones({total}, at::kByte);
    const auto finish_own = [=] {
      if (bytes[-1].item<int>() != 0) return;  // not in the file, and that is allowed
      const std::vector<std::string> texts = cut(bytes, lengths);
      if (is_same_size) {
        load(texts[static_cast<std::size_t>(world.rank())]);
      } else {
        load_others(texts);
      }
    };
    return {.tensors = {{tensor_name, bytes}}, .finish_own = finish_own};
  };
  return {.name = name,
          .has_values = true,
          .is_collective = true,
          .save = save_all,
          .load = load_all,
          .travels = false};
}

}  // namespace lockstep
