// A folder of checkpoints: their names, what makes one whole, and which are kept.
//
//   FOLDER/12-step-600/manifest.json          the files below, their sizes and checksums
//                      state.json             step, schedule, sampler, ...
//                      tensors-0-of-2.safetensors ...
//   FOLDER/.unfinished-0f3c.../               being written
//   FOLDER/.lock                              locked by the process that commits
//
// A folder that is made here is this user's alone; what is made in one is open to those to whom the
// folder is (mode_in()).
// A checkpoint appears under its name by one rename, when all of it is on the disk. Its number says
// which is the newest: a run that goes on from an older one makes newer ones.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "archive/file.h"

namespace lockstep {

struct CheckpointName {
  std::int64_t number = -1;
  std::int64_t step = -1;
  std::string text() const;
};

// The checkpoints that are there by name, whole or not; the newest first.
std::vector<CheckpointName> list_checkpoints(const std::string& folder);

struct Manifest {
  std::int64_t step = 0;
  std::string saved_at = {};  // in UTC
  int world_size = 0;
  std::vector<FileRecord> files = {};
  std::string hash = {};  // of all that is above: stands for the whole checkpoint
};

// Throws: UsageError, SystemError if it is not there or not as it was written.
Manifest read_manifest(const std::string& checkpoint);

// Nothing if all files are as the manifest says; else what is wrong with the first that is not.
std::string find_damage(const std::string& checkpoint, const Manifest& manifest);

// The folder, once the caller has it for himself. Throws: UsageError if another process has it.
class CheckpointFolder {
 public:
  explicit CheckpointFolder(std::string path);

  const std::string& path() const { return path_; }

  // Removes what dead processes have left unfinished.
  void remove_orphans() const;
  // The name of a new folder for files that are to become a checkpoint.
  std::string begin() const;
  // Writes the manifest, and makes the checkpoint appear.
  void commit(const std::string& unfinished, const CheckpointName& name, Manifest manifest) const;
  void abandon(const std::string& unfinished) const noexcept;
  // Removes all but the newest `keep_last`, and those whose number `keep_every` divides.
  void retain(int keep_last, int keep_every) const;

 private:
  std::string path_;
  Fd lock_;
};

// Makes the folder if it is not there, and a file in it by whose name others see whether they look
// into the same one. The caller, or remove_orphans(), removes it.
std::string leave_probe(const std::string& path);

}  // namespace lockstep
