// Files for plots. Lines and events are flushed one by one: a run that dies has them all.

#include <fcntl.h>
#include <lockstep/metrics.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/gauges.h"
#include "base/posix.h"
#include "base/text.h"

namespace lockstep {
namespace {

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::shared_ptr<std::FILE> open_for_appending(const std::string& path) {
  std::error_code ignored;  // what is wrong, opening says
  const std::filesystem::path folder = std::filesystem::absolute(path).parent_path();
  std::filesystem::create_directories(folder, ignored);
  Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, mode_in(folder, 0666)));
  std::FILE* const file = fd ? ::fdopen(fd.get(), "a") : nullptr;
  if (file == nullptr) {
    throw_errno(text::format("cannot write {}", path),
                "Give a folder that this user may write to.");
  }
  fd.release();  // fclose() closes it
  return {file, std::fclose};
}

void append(const std::shared_ptr<std::FILE>& file, const std::string& path,
            const std::string& bytes) {
  if (std::fwrite(bytes.data(), 1, bytes.size(), file.get()) != bytes.size() ||
      std::fflush(file.get()) != 0) {
    throw_errno(text::format("cannot write {}", path), "Check whether the disk is full.");
  }
}

// CRC-32C (Castagnoli), as TensorBoard's records have it: rotated, and a constant added.
std::uint32_t masked_crc(const std::string& bytes) {
  static const auto table = [] {
    std::array<std::uint32_t, 256> made{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0x82F63B78U : 0);
      made[i] = value;
    }
    return made;
  }();
  std::uint32_t crc = ~0U;
  for (const char one : bytes)
    crc = table[(crc ^ static_cast<unsigned char>(one)) & 0xFF] ^ (crc >> 8);
  crc = ~crc;
  return ((crc >> 15) | (crc << 17)) + 0xA282EAD8U;
}

// Numbers with the lowest byte first.
template <typename T>
std::string bytes_of(T value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  std::string bytes;
  for (std::size_t i = 0; i < sizeof value; ++i)
    bytes.push_back(static_cast<char>(bits >> 8 * i & 0xFF));
  return bytes;
}

// Protocol buffers, as much as is needed of them.
std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<char>(value | 0x80));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}
std::string field_key(int number, int kind) {
  return varint(static_cast<std::uint64_t>(number << 3 | kind));
}
std::string field(int number, const std::string& bytes) {
  return field_key(number, 2) + varint(bytes.size()) + bytes;
}
std::string field(int number, double value) { return field_key(number, 1) + bytes_of(value); }
std::string field(int number, float value) { return field_key(number, 5) + bytes_of(value); }

}  // namespace

void show_loss(std::int64_t step, double loss) {
  static const std::shared_ptr<Gauges> gauges =
      Gauges::of_process();  // the process's, not a world's
  gauges->set_loss(step, loss);
}

namespace {

void show(std::int64_t step, const Values& values) {
  if (const auto loss = values.find("loss"); loss != values.end()) show_loss(step, loss->second);
}

}  // namespace

JsonLines::JsonLines(const std::string& path, const World& world) : path_(path) {
  if (world.rank() == 0) file_ = open_for_appending(path);
}

void JsonLines::write(std::int64_t step, const Values& values) {
  if (!file_) return;
  show(step, values);
  nlohmann::ordered_json line = {{"step", step},
                                 {"time", std::round(seconds_since_1970() * 1000) / 1000}};
  for (const auto& [name, value] : values) {
    if (std::isfinite(value)) {
      line[name] = value;
    } else {
      line[name] = nullptr;
    }
  }
  append(file_, path_, line.dump() + "\n");
}

TensorBoard::TensorBoard(const std::string& folder, const World& world) {
  if (world.rank() != 0) return;
  path_ = text::format("{}/events.out.tfevents.{:.0f}.{}.{}", folder, seconds_since_1970(),
                       host_name(), ::getpid());
  file_ = open_for_appending(path_);
  record(field(1, seconds_since_1970()) + field(3, std::string("brain.Event:2")));
}

void TensorBoard::write(std::int64_t step, const Values& values) {
  if (!file_) return;
  show(step, values);
  std::string summary;
  for (const auto& [name, value] : values) {
    summary += field(1, field(1, name) + field(2, static_cast<float>(value)));
  }
  record(field(1, seconds_since_1970()) + field_key(2, 0) +
         varint(static_cast<std::uint64_t>(step)) + field(5, summary));
}

void TensorBoard::record(const std::string& event) {
  const std::string length = bytes_of(static_cast<std::uint64_t>(event.size()));
  append(file_, path_, length + bytes_of(masked_crc(length)) + event + bytes_of(masked_crc(event)));
}

}  // namespace lockstep
