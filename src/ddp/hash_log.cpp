#include "ddp/hash_log.h"

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <lockstep/ddp.h>
#include <lockstep/error.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "base/env.h"
#include "base/log.h"
#include "base/text.h"
#include "ddp/agreement.h"
#include "ddp/platform.h"
#include "world/exchange.h"

namespace lockstep {
namespace {

using OrderedJson = nlohmann::ordered_json;  // as a person reads it: the step first

// How every log begins: by this, a file of another kind is not written to.
constexpr std::string_view kLogBegin = R"({"format":"lockstep hashes",)";

std::string hex_of(std::uint64_t hash) { return text::format("{:016x}", hash); }

// A name need not be UTF-8, which JSON must be.
std::string to_line(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace) + "\n";
}

}  // namespace

int HashLog::steps_between() {
  return Environment::of_process().get_int("LOCKSTEP_HASH_EVERY").value_or(0);
}

HashLog::HashLog(int every, std::string path, std::string model, int rank)
    : every_(every), path_(std::move(path)), model_(std::move(model)), rank_(rank) {}

std::unique_ptr<HashLog> HashLog::open(const World& world, const std::string& model) {
  const int every = steps_between();
  if (every == 0) return nullptr;
  const std::string path =
      Environment::of_process().get("LOCKSTEP_HASH_LOG").value_or("lockstep-hashes.jsonl");
  std::unique_ptr<HashLog> log(new HashLog(every, path, model, world.global_rank()));
  do_together(world, "DistributedDataParallel", [&] {
    if (world.rank() == 0) log->begin_file(world);
  });
  return log;
}

void HashLog::begin_file(const World& world) {
  file_ = Fd(::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  struct stat status {};
  if (!file_ || ::fstat(file_.get(), &status) != 0) {
    throw_errno(text::format("cannot open {} for hashes of the parameters", path_),
                "Give a file that can be written to: lockstep run --hash-log, or the variable "
                "LOCKSTEP_HASH_LOG.");
  }
  char last = '\n';
  if (status.st_size > 0) {
    std::string start(kLogBegin.size(), '\0');
    if (::pread(file_.get(), start.data(), start.size(), 0) < 0 || start != kLogBegin) {
      throw UsageError({.rank = rank_, .operation = "DistributedDataParallel"},
                       text::format("{} is there and is not a log of hashes.\nGive another file: "
                                    "lockstep run --hash-log, or the variable LOCKSTEP_HASH_LOG.",
                                    path_));
    }
    (void)!::pread(file_.get(), &last, 1, status.st_size - 1);
  }
  // A run that was killed, or found no room, may have left half a line.
  std::string header = last == '\n' ? "" : "\n";
  header += to_line({{"format", "lockstep hashes"},
                     {"version", 1},
                     {"every", every_},
                     {"ranks", world.size()},
                     {"logical_ranks", world.has_logical_ranks() ? world.logical_size() : 0},
                     {"seed", world.seed()},
                     {"threads", at::get_num_threads()},
                     {"platform", platform()}});
  append(header);
}

// One write each: several models, and processes that are about to end, append to the same file.
void HashLog::append(const std::string& line) const {
  ssize_t written = -1;
  do {
    errno = 0;
    written = ::write(file_.get(), line.data(), line.size());
  } while (written < 0 && errno == EINTR);
  if (written == static_cast<ssize_t>(line.size())) return;
  if (written >= 0) errno = ENOSPC;  // a part of it: what is missing had no room
  throw_errno(text::format("cannot write hashes of the parameters to {}", path_),
              "Check whether the disk is full.");
}

void HashLog::write(std::int64_t step, const std::vector<NamedTensor>& parameters) {
  const std::vector<std::int64_t> hashes = hashes_of(parameters);
  OrderedJson tensors = OrderedJson::object();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    tensors[parameters[i].name] = hex_of(static_cast<std::uint64_t>(hashes[i]));
  }
  try {
    append(to_line({{"step", step},
                    {"model", model_},
                    {"hash", hex_of(hash_of_all(hashes))},
                    {"tensors", std::move(tensors)}}));
  } catch (const Error& error) {
    file_.reset();
    Log(rank_).warning("{} Training goes on; hashes from step {} on are missing.",
                       error.message().substr(0, error.message().find('\n')), step);
  }
}

}  // namespace lockstep
