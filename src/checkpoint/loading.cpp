// Loading: the leaders look for the newest checkpoint that is whole; on one host all ranks then
// read it, and over several hosts one reads and all receive.

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>
#include <filesystem>

#include "base/log.h"
#include "base/purpose.h"
#include "base/text.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/own_tensors.h"
#include "checkpoint/sharing.h"
#include "checkpoint/tensors.h"
#include "ddp/shards.h"
#include "ddp/slices.h"
#include "world/exchange.h"
#include "world/packed.h"

namespace lockstep {
namespace {

// What is in a checkpoint's files: for each tensor its place, and the file.
struct Contents {
  std::vector<FileReader> files;
  std::map<std::string, TensorEntry> tensors;
  std::map<std::string, std::size_t> file_of;
  Json state;
  int num_own_files = 0;  // one for each rank of the run that saved them, or none
};

Contents open_checkpoint(const std::string& path) {
  Contents contents;
  const Manifest manifest = read_manifest(path);
  for (const FileRecord& record : manifest.files) {
    const std::string file = path + "/" + record.name;
    if (is_own_file(record.name)) {
      contents.num_own_files = manifest.world_size;
      continue;
    }
    if (record.name == "state.json") {
      contents.state = parse_json(read_whole(file), file);
      if (const auto version = contents.state.value("version", kStateVersion);
          version > kStateVersion) {
        throw UsageError({.operation = "load"},
                         text::format("{} is of version {}, this lockstep knows {}.\nUse a newer "
                                      "lockstep.",
                                      file, version, kStateVersion));
      }
      continue;
    }
    contents.files.emplace_back(file);
    for (auto& [name, entry] : contents.files.back().tensors().tensors) {
      contents.file_of[name] = contents.files.size() - 1;
      contents.tensors[name] = entry;
    }
  }
  return contents;
}

// For ranks that do not see the files.
Json describe(const Contents& contents) {
  Json tensors = Json::object();
  for (const auto& [name, entry] : contents.tensors) tensors[name] = {entry.dtype, entry.shape};
  return {
      {"tensors", tensors}, {"state", contents.state}, {"num_own_files", contents.num_own_files}};
}

Contents from_description(const Json& description) {
  Contents contents;
  contents.state = description.at("state");
  contents.num_own_files = description.at("num_own_files");
  for (const auto& [name, entry] : description.at("tensors").items()) {
    contents.tensors[name] = {.dtype = entry[0],
                              .shape = entry[1].get<std::vector<std::int64_t>>()};
  }
  return contents;
}

}  // namespace

// Of this rank's folder. What stands before it is told in `skipped`.
std::optional<CheckpointName> Checkpointer::Impl::find_newest(
    std::vector<std::string>& skipped) const {
  for (const CheckpointName& name : list_checkpoints(path)) {
    const std::string one = path + "/" + name.text();
    std::string damage;
    try {
      damage = find_damage(one, read_manifest(one));
      if (damage.empty()) open_checkpoint(one);  // of a program that writes otherwise
    } catch (const Error& error) {
      damage = error.message().substr(0, error.message().find('\n'));
    } catch (const std::exception& error) {
      damage = error.what();
    }
    if (damage.empty()) return name;
    skipped.push_back(text::format("{}: {}", one, damage));
  }
  return std::nullopt;
}

namespace {

// What is wanted of a checkpoint, and what of it is there.
struct Wanted {
  std::vector<Wish> wishes;
  std::vector<NamedTensor> fitting;
  std::vector<SharedState> shared;
  std::vector<SlicedState> sliced;
};

// What does not fit is added to `loaded`. Changes nothing.
Wanted find_wanted(const std::vector<Part>& parts, const Contents& contents, bool must_have_type,
                   Loaded& loaded) {
  Wanted wanted;
  std::vector<NamedTensor> tensors;
  const Json values = contents.state.value("parts", Json::object());
  for (const Part& part : parts) {
    if (part.has_values && !values.contains(part.name)) {
      loaded.differences.push_back(text::format("missing: {}", part.name));
      continue;
    }
    try {
      wanted.wishes.push_back(part.load(part.has_values ? values.at(part.name) : Json()));
    } catch (const Json::exception&) {
      loaded.differences.push_back(text::format("{}: not as lockstep writes it", part.name));
      continue;
    }
    const Wish& wish = wanted.wishes.back();
    tensors.insert(tensors.end(), wish.tensors.begin(), wish.tensors.end());
    wanted.shared.insert(wanted.shared.end(), wish.shared.begin(), wish.shared.end());
    wanted.sliced.insert(wanted.sliced.end(), wish.sliced.begin(), wish.sliced.end());
    loaded.differences.insert(loaded.differences.end(), wish.differences.begin(),
                              wish.differences.end());
  }
  for (const auto& one : values.items()) {
    const auto is_it = [&](const Part& part) { return part.has_values && part.name == one.key(); };
    if (std::ranges::none_of(parts, is_it)) {
      loaded.differences.push_back(text::format("unexpected: {}", one.key()));
    }
  }
  const auto more = compare(contents.tensors, tensors, must_have_type, wanted.fitting);
  loaded.differences.insert(loaded.differences.end(), more.begin(), more.end());
  return wanted;
}

// A state of which each rank keeps a slice.
struct NamedSlice {
  std::string name;  // empty: the file does not have it
  SlicedState state;
};

// Takes them out of `wanted.fitting`.
std::vector<NamedSlice> take_sliced(Wanted& wanted) {
  std::vector<NamedSlice> all;
  for (const SlicedState& one : wanted.sliced) {
    const auto is_it = [&](const NamedTensor& its) { return its.tensor.is_same(one.tensor); };
    const auto found = std::ranges::find_if(wanted.fitting, is_it);
    all.push_back({found == wanted.fitting.end() ? "" : found->name, one});
    if (found != wanted.fitting.end()) wanted.fitting.erase(found);
  }
  return all;
}

// One after the other. `reader`: who reads all and sends it to the others; -1: each rank reads.
// Collective.
void load_slices(const World& world, const std::vector<NamedSlice>& sliced,
                 const Contents& contents, bool is_reader, int reader) {
  for (const NamedSlice& one : sliced) {
    at::Tensor whole;
    if (!one.name.empty()) {
      const at::Tensor& wanted = one.state.tensor;
      whole = at::empty(wanted.sizes(), at::TensorOptions(wanted.scalar_type()));
      do_together(world, "load", [&] {
        if (!is_reader) return;
        read_tensor(contents.files[contents.file_of.at(one.name)], contents.tensors.at(one.name),
                    whole);
      });
      if (reader >= 0) world.broadcast(whole, reader);
    }
    do_together(world, "load", [&] { take_slice(one.state, whole); });
  }
}

// The models in slices whose parameters or states were loaded hear of it.
void note_loaded_slices(const std::vector<at::Tensor>& tensors,
                        const std::vector<NamedSlice>& sliced) {
  std::vector<std::shared_ptr<Slices>> all;
  const auto add = [&](const std::shared_ptr<Slices>& one) {
    if (one && std::ranges::find(all, one) == all.end()) all.push_back(one);
  };
  for (const at::Tensor& one : tensors) add(Slices::holder_of(one));
  for (const auto& slices : all) {
    std::vector<std::size_t> with_states;
    for (const NamedSlice& one : sliced) {
      if (one.state.slices == slices) with_states.push_back(one.state.slot);
    }
    slices->note_loaded(tensors, with_states);
  }
}

}  // namespace

// `reader`: the rank that surely can read it; if `can_all_read`, all do.
Loaded Checkpointer::Impl::load(const std::string& its_path, bool can_all_read, int reader,
                                const LoadOptions& load_options) {
  check_same_parts("load");
  const bool is_reader = can_all_read || world.rank() == reader;
  Contents contents;
  do_together(world, "load", [&] {
    if (is_reader) contents = open_checkpoint(its_path);
  });
  if (!can_all_read) {
    const std::string text =
        share_text(world, is_reader ? describe(contents).dump() : std::string(), reader);
    if (!is_reader) contents = from_description(Json::parse(text));
  }

  Wanted wanted;
  Loaded loaded{.step = contents.state.value("step", std::int64_t{0}), .path = its_path};
  const bool has_own = contents.num_own_files > 0 && !ddps.empty();
  do_together(world, "load", [&] {
    wanted = find_wanted(parts, contents, load_options.strict, loaded);
    if (contents.num_own_files > 0 && !has_own) {
      loaded.differences.emplace_back("unexpected: the state of comm hooks");
    }
    if (load_options.strict && !loaded.differences.empty()) {
      throw_differences(its_path, loaded.differences, world.global_rank());
    }
    check_sharers(world, wanted.fitting, wanted.shared, wanted.sliced);
    for (const NamedTensor& one : wanted.fitting) {
      if (!Shards::is_torn(one.tensor) || Shards::holder_of(one.tensor)) continue;
      throw UsageError({.rank = world.global_rank(), .operation = "load"},
                       text::format("'{}' is half updated, in memory that ranks have shared "
                                    "(DdpOptions::shard).\nWrap the model again before loading.",
                                    one.name));
    }
  });
  std::vector<HookState> own;
  if (has_own) {
    try {
      own = read_own_tensors(world, its_path, contents.num_own_files, reader, ddps);
    } catch (const Error&) {  // on all ranks alike
      if (load_options.strict) throw;
      loaded.differences.emplace_back("left out: the state of comm hooks");
    }
  }

  do_together(world, "load", [&] { make_memory(wanted.shared); });
  const auto sliced = take_sliced(wanted);
  // Who ends in the middle leaves a mixture.
  const auto holders = holders_of(wanted.fitting);
  std::vector<bool> were_torn;
  for (const auto& shards : holders) were_torn.push_back(shards->is_torn());
  if (!holders.empty()) world.barrier();  // all have looked
  for (const auto& shards : holders) shards->set_torn(true);
  const auto is_mine = [&](const at::Tensor& tensor) {
    return is_written_here(tensor, can_all_read ? -1 : world.global_rank(reader));
  };
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& one : wanted.fitting) tensors.push_back(one.tensor);
  do_together(world, "load", [&] {
    for (const SharedState& one : wanted.shared) {
      if (is_mine(one.tensor)) one.tensor.zero_();  // the file may not have it
    }
    if (!is_reader) return;
    for (const NamedTensor& one : wanted.fitting) {
      if (!is_mine(one.tensor)) continue;
      const TensorEntry& entry = contents.tensors.at(one.name);
      read_tensor(contents.files[contents.file_of.at(one.name)], entry, one.tensor);
    }
  });
  if (!can_all_read) {
    const auto move = [&](const at::Tensor& packed) { world.broadcast(packed, reader); };
    move_packed(tensors, move, is_mine);
    world.barrier();  // what others have written for this rank is there
  }
  mark_written(tensors);
  load_slices(world, sliced, contents, is_reader, can_all_read ? -1 : reader);
  note_loaded_slices(tensors, sliced);
  for (const SharedState& one : wanted.shared) tensors.push_back(one.tensor);
  for (std::size_t i = 0; i < holders.size(); ++i) holders[i]->note_loaded(tensors, were_torn[i]);
  do_together(world, "load", [&] {
    for (const Wish& wish : wanted.wishes) wish.finish();
  });
  do_together(world, "load", [&] {
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (!own[i].empty()) ddps[i]->load_hook_state(own[i]);
    }
    for (const Wish& wish : wanted.wishes) wish.finish_own();
  });
  return loaded;
}

Loaded Checkpointer::load_latest(const LoadOptions& options) {
  const PurposeScope purpose(Purpose::kLoad);
  impl_->wait();
  const World& world = impl_->world;
  if (world.is_waiting()) return {};  // its state comes from the other ranks
  impl_->settle_if_changed();
  Json mine = {{"number", -1}, {"text", ""}, {"skipped", Json::array()}, {"failure", ""}};
  try {
    if (impl_->is_leader()) {
      std::vector<std::string> skipped;
      if (const auto found = impl_->find_newest(skipped)) {
        mine["number"] = found->number;
        mine["text"] = found->text();
      }
      mine["skipped"] = skipped;
    }
  } catch (const std::exception&) {
    mine["failure"] = failure_text(std::current_exception(), world.global_rank());
  }
  int reader = -1;
  std::int64_t newest = -1;
  std::string name;
  std::vector<std::string> failures;
  std::vector<std::string> skipped;
  for (const std::string& text : exchange_texts(world, to_text(mine))) {
    const Json its = Json::parse(text);
    failures.push_back(its.at("failure"));
    for (const auto& one : its.at("skipped")) skipped.push_back(one);
    if (its.at("number").get<std::int64_t>() <= newest) continue;
    newest = its.at("number");
    name = its.at("text");
    reader = static_cast<int>(failures.size()) - 1;
  }
  throw_first_cause(world, failures, {.rank = world.global_rank(), .operation = "load_latest"});
  if (reader < 0 && skipped.empty()) return {};
  if (reader < 0) {
    throw UsageError({.rank = world.global_rank(), .operation = "load_latest"},
                     text::format("None of the checkpoints is whole:\n  {}\nTake a copy from "
                                  "elsewhere, or remove them to begin anew.",
                                  text::join(skipped, "\n  ")));
  }
  if (world.rank() == 0) {
    for (const std::string& one : skipped) Log(world.global_rank()).warning("skipped {}", one);
  }
  const bool can_all_read =
      impl_->is_on_one_host() && impl_->group.size() == static_cast<std::size_t>(world.size());
  Loaded loaded = impl_->load(impl_->path + "/" + name, can_all_read, reader, options);
  loaded.skipped = skipped;
  return loaded;
}

Loaded Checkpointer::load(const std::string& path, const LoadOptions& options) {
  const PurposeScope purpose(Purpose::kLoad);
  impl_->wait();
  const World& world = impl_->world;
  if (world.is_waiting()) return {};
  std::error_code ignored;
  const bool is_visible = std::filesystem::exists(path, ignored);
  // The first rank that sees it looks whether it is whole.
  int reader = -1;
  const auto seen = exchange_texts(world, is_visible ? "1" : "0");
  for (int rank = world.size() - 1; rank >= 0; --rank) {
    if (seen[static_cast<std::size_t>(rank)] == "1") reader = rank;
  }
  do_together(world, "load", [&] {
    if (world.rank() != std::max(reader, 0)) return;
    const std::string damage = find_damage(path, read_manifest(path));
    if (damage.empty()) return;
    throw UsageError({.rank = world.global_rank(), .operation = "load"},
                     text::format("{} is not whole: {}.\nTake another checkpoint.", path, damage));
  });
  const bool can_all_read = impl_->is_on_one_host() && std::ranges::count(seen, "0") == 0;
  return impl_->load(path, can_all_read, reader, options);
}

}  // namespace lockstep
