#include "world/device.h"

#include <ATen/DeviceAccelerator.h>
#include <lockstep/error.h>
#include <lockstep/world.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "base/env.h"
#include "base/text.h"
#include "engine/hosts.h"
#include "world/state.h"

namespace lockstep {
namespace {

// Schedulers show each rank a device of its own by a variable, or by a cgroup that refuses the
// files of all others; then all ranks may have the same variable. LibTorch has no name for a device
// that is the same in all processes.
std::string visible_devices() {
  constexpr int kMostFiles = 64;
  const Environment environment = Environment::of_process();
  std::string text;
  for (const char* const name : {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
                                 "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"}) {
    text += environment.get(name).value_or("") + "/";
  }
  for (int i = 0; i < kMostFiles; ++i) {
    const std::string file = text::format("/dev/nvidia{}", i);
    if (::access(file.c_str(), R_OK | W_OK) == 0) text += text::format(" {}", i);
  }
  return text;
}

std::string describe_devices(const Member& member) {
  if (member.num_devices == 0) return "the CPU only";
  return text::format("{} of type {}", member.num_devices, member.device_type);
}

bool has_type(const Member& member, const std::string& type) {
  return member.num_devices > 0 && member.device_type == type;
}

[[noreturn]] void throw_no_device(const ErrorPlace& place, const std::string& name,
                                  const Member& member) {
  throw UsageError(place, text::format("There is no device {} on rank {}, which sees {}.\nGive "
                                       "another, or auto; lockstep doctor says what the machine "
                                       "has.",
                                       name, member.rank, describe_devices(member)));
}

at::Device parse(const ErrorPlace& place, const std::string& name) {
  try {
    return at::Device(name);
  } catch (const c10::Error&) {
    throw UsageError(place,
                     text::format("'{}' is not a device.\nGive auto, cpu, cuda or cuda:N.", name));
  }
}

}  // namespace

void look_at_devices(Member& self) {
  const auto type = at::getAccelerator(false);
  const int count = type ? at::accelerator::deviceCount() : 0;
  if (count == 0) return;
  self.device_type = c10::DeviceTypeName(*type, true);
  self.num_devices = count;
  self.visible_devices = visible_devices();
}

void number_devices(std::vector<Member>& members) {
  for (std::vector<int> here : Hosts(members).ranks) {
    const auto member = [&](int rank) -> Member& {
      return members[static_cast<std::size_t>(rank)];
    };
    std::ranges::sort(here, {}, [&](int rank) { return member(rank).local_rank; });
    std::map<std::string, int> num_given;  // of those that are seen by the same ranks
    for (const int rank : here) {
      member(rank).device_index = num_given[member(rank).visible_devices]++;
    }
  }
}

at::Device choose_device(const std::vector<Member>& members, int rank, const std::string& name,
                         bool takes_devices) {
  const Member& self = members[static_cast<std::size_t>(rank)];
  const ErrorPlace place{.rank = self.rank, .operation = "World::device"};
  const bool is_auto = name == "auto";
  std::string type = members.front().device_type;
  if (!is_auto) {
    const at::Device wanted = parse(place, name);
    if (wanted.is_cpu()) return at::kCPU;
    type = c10::DeviceTypeName(wanted.type(), /*lower_case=*/true);
    if (wanted.has_index()) {
      if (!has_type(self, type) || wanted.index() >= self.num_devices) {
        throw_no_device(place, name, self);
      }
      return wanted;
    }
  }
  for (const Member& member : members) {
    if (has_type(member, type) && (takes_devices || !is_auto)) continue;
    if (is_auto) return at::kCPU;
    throw_no_device(place, name, member);
  }
  for (const Member& member : members) {
    if (member.device_index < member.num_devices) continue;
    throw UsageError(
        place, text::format("Rank {} has no device of its own: it sees {}, and other ranks of "
                            "host {} have them.\nStart one rank for each device (-n auto), or give "
                            "cpu.",
                            member.rank, describe_devices(member), member.host));
  }
  return {at::Device(type).type(), static_cast<c10::DeviceIndex>(self.device_index)};
}

at::Device World::device(const std::string& name) const {
  return choose_device(members(), rank(), name, state_->traits.takes_devices);
}

}  // namespace lockstep
