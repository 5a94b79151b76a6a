// The engines of this build: for each, whether it can be used, and how it connects the ranks.
//
// An engine that cannot be built is a no_NAME.cpp in place of its NAME.cpp (LockstepEngines.cmake).
#pragma once

#include <lockstep/backend.h>

#include <functional>
#include <memory>
#include <string>

namespace lockstep {

namespace shm {
class Group;
}

using Backend = c10::intrusive_ptr<c10d::Backend>;

// A world of one: every collective is a copy.
Backend make_solo(const EngineContext& context);

// All ranks on one host, connected by shared memory.
Backend make_shm(const EngineContext& context);
std::shared_ptr<shm::Group> connect_by_memory(const EngineContext& context,
                                              std::function<std::string(int)> describe);

// Ranks of any hosts: shared memory inside each, and between them another engine of that name.
Backend make_hierarchical(const EngineContext& context, const std::string& between);
Backend make_wire_engine(const std::string& name, const EngineContext& context);

std::string why_no_gloo();  // empty if there is Gloo
Backend make_gloo(const EngineContext& context);

std::string why_no_mpi();  // empty if there is MPI
Backend make_mpi(const EngineContext& context);
bool has_started_ranks_by_mpi(const EngineContext& context);  // by the MPI of this build

// Tensors on GPUs go through NCCL, all others through `cpu`.
std::string why_no_nccl();  // empty if there is NCCL
Backend make_nccl(const EngineContext& context, const Backend& cpu);

// What callers must know of an engine.
struct Traits {
  bool takes_devices = false;      // tensors that are not in main memory
  bool writes_to_sockets = false;  // in the caller's thread
};
Traits traits_of(const c10d::Backend& engine);

// What `auto` stands for, and why.
struct Choice {
  std::string name;
  std::string reason;
};
Choice choose_engine(const std::string& name, const EngineContext& context);

// For tests: another engine, which is taken by its name only. Not while a world is joined.
void add_engine_for_tests(const std::string& name, Backend (*make)(const EngineContext&));

// Throws UsageError: the engine is not in this build.
[[noreturn]] void throw_not_built(int rank, const std::string& name, const std::string& reason);

}  // namespace lockstep
