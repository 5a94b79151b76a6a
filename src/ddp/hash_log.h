// HashLog: hashes of the parameters, written every so many steps, so that two runs can be compared
// (`lockstep verify`) without storing weights.
//
// A file of JSON lines that rank 0 writes: a header for each wrapped model, then entries.
//   {"format":"lockstep hashes","version":1,"every":100,"ranks":2,"logical_ranks":8,...}
//   {"step":100,"model":"","hash":"16 hex digits","tensors":{"fc1.weight":"16 hex digits",...}}
// An entry has the parameters after `step` steps of the run. A file that exists is continued.
// Bytes are hashed in the order of memory: strides are the same in two runs of one program.
// Threading: none; the reducer's lock guards it.
#pragma once

#include <lockstep/world.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/posix.h"

namespace lockstep {

struct NamedTensor;

class HashLog {
 public:
  // LOCKSTEP_HASH_EVERY; 0: no hashes are asked for. Throws: UsageError.
  static int steps_between();

  // Null if no hashes are asked for; else collective. Throws: SystemError on all ranks if rank 0
  // cannot write to the file (LOCKSTEP_HASH_LOG), UsageError if it is not a log of hashes.
  static std::unique_ptr<HashLog> open(const World& world, const std::string& model);

  // Whether this rank writes an entry after `step` steps of the run.
  bool is_due(std::int64_t step) const { return file_ && step % every_ == 0; }
  // Not collective. A write that fails is a warning, and nothing is written after it: training goes
  // on.
  void write(std::int64_t step, const std::vector<NamedTensor>& parameters);

 private:
  HashLog(int every, std::string path, std::string model, int rank);
  void begin_file(const World& world);
  void append(const std::string& line) const;

  const int every_;
  const std::string path_;
  const std::string model_;  // DdpOptions::name
  const int rank_;           // for errors
  Fd file_;                  // of rank 0; closed after a failure
};

}  // namespace lockstep
