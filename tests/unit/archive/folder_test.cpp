#include "archive/folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <lockstep/error.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "base/posix.h"
#include "launch/inspect.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

class Folder : public testing::Test {
 protected:
  Folder() {
    std::string name = testing::TempDir() + "lockstep-folder-XXXXXX";
    path_ = ::mkdtemp(name.data());
  }
  ~Folder() override { fs::remove_all(path_); }

  // A checkpoint with one tensor of two numbers, and a state.
  static std::string commit(const CheckpointFolder& folder, std::int64_t number,
                            std::int64_t step) {
    const std::string name_now = folder.begin();
    std::vector<std::pair<std::string, TensorEntry>> tensors = {
        {"w", {.dtype = "F32", .shape = {2}}}};
    const float values[2] = {1, static_cast<float>(step)};
    std::string bytes = make_header(tensors, {});
    bytes.append(reinterpret_cast<const char*>(values), sizeof values);
    Manifest manifest{.step = step, .world_size = 1};
    const std::string unfinished = folder.path() + "/" + name_now;
    manifest.files.push_back(write_file(unfinished, "tensors-0-of-1.safetensors", bytes));
    manifest.files.push_back(
        write_file(unfinished, "state.json", R"({"step":)" + std::to_string(step) + "}"));
    const CheckpointName name{number, step};
    folder.commit(name_now, name, manifest);
    return folder.path() + "/" + name.text();
  }

  static void change_byte(const std::string& file, std::streamoff at) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(at);
    const char changed = static_cast<char>(stream.get() ^ 1);
    stream.seekp(at);
    stream.put(changed);
  }

  std::string path_;
};

std::string damage_of(const std::string& checkpoint) try {
  return find_damage(checkpoint, read_manifest(checkpoint));
} catch (const Error& error) {
  return error.message();
}

TEST_F(Folder, ACheckpointIsWholeWhenItHasItsName) {
  const CheckpointFolder folder(path_);
  const std::string checkpoint = commit(folder, 3, 40);
  EXPECT_EQ(checkpoint, path_ + "/3-step-40");
  EXPECT_EQ(damage_of(checkpoint), "");
  const Manifest manifest = read_manifest(checkpoint);
  EXPECT_EQ(manifest.step, 40);
  EXPECT_EQ(manifest.files.size(), 2U);
  commit(folder, 4, 20);  // a run that went back goes on
  commit(folder, 10, 30);
  const auto names = list_checkpoints(path_);
  ASSERT_EQ(names.size(), 3U);
  EXPECT_EQ(names[0].text(), "10-step-30");
  EXPECT_EQ(names[1].text(), "4-step-20");
}

TEST_F(Folder, AnyBitThatChangesIsFound) {
  const CheckpointFolder folder(path_);
  const std::string checkpoint = commit(folder, 0, 7);
  for (const std::string name : {"tensors-0-of-1.safetensors", "state.json", "manifest.json"}) {
    const std::string file = checkpoint + "/" + name;
    const auto size = static_cast<std::streamoff>(fs::file_size(file));
    for (std::streamoff at = 0; at < size; ++at) {
      change_byte(file, at);
      EXPECT_NE(damage_of(checkpoint), "") << name << " byte " << at;
      change_byte(file, at);
    }
    EXPECT_EQ(damage_of(checkpoint), "");
  }
}

TEST_F(Folder, WhatIsMissingOrShortIsNamed) {
  const CheckpointFolder folder(path_);
  const std::string checkpoint = commit(folder, 0, 7);
  fs::resize_file(checkpoint + "/state.json", 3);
  EXPECT_EQ(damage_of(checkpoint), "state.json has 3 bytes instead of 10");
  fs::remove(checkpoint + "/state.json");
  EXPECT_NE(damage_of(checkpoint).find("state.json: No such file"), std::string::npos);
  fs::rename(checkpoint + "/manifest.json", checkpoint + "/manifest");
  EXPECT_NE(damage_of(checkpoint).find("has no manifest.json"), std::string::npos);
  fs::rename(checkpoint, path_ + "/a-step-7");
  EXPECT_TRUE(list_checkpoints(path_).empty());
}

TEST_F(Folder, WhatMayNotBeReadIsNamed) {
  fs::permissions(path_, fs::perms::all);
  const CheckpointFolder folder(path_);
  const std::string checkpoint = commit(folder, 0, 7);
  ASSERT_EQ(::chmod((checkpoint + "/state.json").c_str(), 0), 0);
  constexpr uid_t kNobody = 65534;
  const uid_t me = ::geteuid();
  if (me == 0) {
    ASSERT_EQ(::seteuid(kNobody), 0);  // root may read everything
  }
  const std::string damage = damage_of(checkpoint);
  if (me == 0) {
    ASSERT_EQ(::seteuid(me), 0);
  }
  EXPECT_NE(damage.find("/state.json: Permission denied"), std::string::npos) << damage;
}

// What is in a private folder is private wherever it is moved or copied to.
TEST_F(Folder, FilesAreOpenToThoseToWhomTheFolderIs) {
  const mode_t umask_before = ::umask(022);
  const auto mode = [](const std::string& path) {
    struct stat status {};
    EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
    return status.st_mode & 0777;
  };
  for (const mode_t folder_mode : {0700, 0750, 0755, 0777, 0711}) {
    const std::string path = path_ + "/" + std::to_string(folder_mode);
    ASSERT_EQ(::mkdir(path.c_str(), 0700), 0);
    ASSERT_EQ(::chmod(path.c_str(), folder_mode), 0);
    const CheckpointFolder folder(path);
    const std::string checkpoint = commit(folder, 0, 7);
    EXPECT_EQ(mode(checkpoint), folder_mode & 0755) << folder_mode;
    for (const char* file : {"/state.json", "/tensors-0-of-1.safetensors", "/manifest.json"}) {
      EXPECT_EQ(mode(checkpoint + file), folder_mode & 0644) << folder_mode;
    }
    EXPECT_EQ(mode(path + "/.lock"), folder_mode & 0644) << folder_mode;
  }
  // One that is made belongs to this user alone.
  const CheckpointFolder made(path_ + "/runs/made/");
  EXPECT_EQ(mode(path_ + "/runs"), 0755U);
  EXPECT_EQ(mode(path_ + "/runs/made"), 0700U);
  EXPECT_EQ(mode(commit(made, 0, 7) + "/state.json"), 0600U);
  ::umask(umask_before);
}

TEST_F(Folder, OrphansGoAndOldOnesGo) {
  {
    const CheckpointFolder folder(path_);
    write_file(path_ + "/" + folder.begin(), "tensors-0-of-1.safetensors", "half of it");
    leave_probe(path_);
  }
  const CheckpointFolder folder(path_);
  folder.remove_orphans();
  EXPECT_EQ(std::distance(fs::directory_iterator(path_), {}), 1) << "more than the lock is left";
  for (int i = 0; i < 10; ++i) commit(folder, i, i * 100);
  folder.retain(2, 4);
  std::vector<std::string> left;
  for (const auto& name : list_checkpoints(path_)) left.push_back(name.text());
  EXPECT_EQ(left, (std::vector<std::string>{"9-step-900", "8-step-800", "4-step-400", "0-step-0"}));
  folder.retain(0, 0);
  EXPECT_EQ(list_checkpoints(path_).size(), 4U);
}

TEST_F(Folder, TwoRunsDoNotShareIt) {
  EXPECT_TRUE(fs::exists(path_ + "/./" + leave_probe(path_)));
  EXPECT_FALSE(fs::exists(path_ + "/" + leave_probe(path_ + "/other/folder")));
  const CheckpointFolder folder(path_);
  try {
    const CheckpointFolder second(path_);
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("Another run writes its checkpoints to " + path_),
              std::string::npos);
  }
  EXPECT_THROW(CheckpointFolder("/proc/nothing"), SystemError);
}

// NFS may keep the lock of a host that is gone. Only a person can know: names of hosts are not
// unique.
TEST_F(Folder, ALockSaysWhoseItIsAndCanBeRemoved) {
  const std::string file = path_ + "/.lock";
  std::ofstream(file) << Json{{"host", "far"}, {"pid", 77}};
  const Fd held(::open(file.c_str(), O_RDWR));
  EXPECT_EQ(::flock(held.get(), LOCK_EX | LOCK_NB), 0);
  try {
    const CheckpointFolder folder(path_);
    ADD_FAILURE();
  } catch (const UsageError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("process 77 of host far"), std::string::npos) << text;
    EXPECT_NE(text.find("remove " + file), std::string::npos) << text;
  }
  fs::remove(file);
  const CheckpointFolder folder(path_);
  try {
    const CheckpointFolder second(path_);
    ADD_FAILURE();
  } catch (const UsageError& error) {
    const std::string me = "of host " + host_name();
    EXPECT_NE(std::string(error.what()).find(me), std::string::npos) << error.what();
  }
}

TEST_F(Folder, InspectSaysWhatIsThere) {
  const CheckpointFolder folder(path_);
  const std::string one = commit(folder, 0, 7);
  const std::string two = commit(folder, 1, 8);
  Report report = inspect(one);
  EXPECT_EQ(report.code, 0);
  EXPECT_NE(report.text.find("whole\n  step 7"), std::string::npos) << report.text;
  EXPECT_NE(report.text.find("w  F32 [2]"), std::string::npos) << report.text;
  report = diff(one, two);
  EXPECT_EQ(report.code, 1);
  EXPECT_EQ(report.text, "w: 1 of 2 values differ, by up to 1\nstate/step: 7 and 8\n");
  EXPECT_EQ(diff(one, one).code, 0);
  report = diff(one + "/tensors-0-of-1.safetensors", two + "/tensors-0-of-1.safetensors");
  EXPECT_EQ(report.text, "w: 1 of 2 values differ, by up to 1\n");
  change_byte(two + "/tensors-0-of-1.safetensors", 65);
  report = inspect(path_);
  EXPECT_EQ(report.code, 1);
  EXPECT_NE(
      report.text.find("1-step-8  not whole: tensors-0-of-1.safetensors has a wrong checksum"),
      std::string::npos)
      << report.text;
  EXPECT_NE(report.text.find("0-step-7  whole"), std::string::npos);
  EXPECT_EQ(inspect(two).code, 1);
  EXPECT_THROW(inspect(path_ + "/nothing"), SystemError);
  EXPECT_THROW(inspect("/proc/self"), UsageError);
}

// A long name makes one line long, not all of them; likewise a long path into the state.
TEST_F(Folder, AReportIsNotMuchLongerThanTheFile) {
  std::vector<std::pair<std::string, TensorEntry>> tensors = {
      {std::string(60'000, 'n'), {.dtype = "F32", .shape = {0}}}};
  nlohmann::json inner = nlohmann::json::object();
  for (int i = 0; i < 1000; ++i) {
    tensors.emplace_back(std::to_string(i), TensorEntry{.dtype = "F32", .shape = {0}});
    inner[std::to_string(i)] = i;
  }
  const std::string file = path_ + "/strange.safetensors";
  std::ofstream(file) << make_header(tensors, {});
  EXPECT_LT(inspect(file).text.size(), 2 * fs::file_size(file));
  EXPECT_TRUE(inspect(file).text.find("nnn...  F32 [0]") != std::string::npos);

  const CheckpointFolder folder(path_);
  const auto commit_state = [&](std::int64_t number, const nlohmann::json& state) {
    const std::string name_now = folder.begin();
    Manifest manifest{.world_size = 1};
    manifest.files.push_back(
        write_file(folder.path() + "/" + name_now, "state.json", state.dump()));
    folder.commit(name_now, {number, 0}, manifest);
    return folder.path() + "/" + CheckpointName{number, 0}.text();
  };
  const std::string key(60'000, 'k');
  const std::string one = commit_state(0, {{key, inner}});
  for (auto& [_, value] : inner.items()) value = -1;
  const Report report = diff(one, commit_state(1, {{key, inner}}));
  EXPECT_LT(report.text.size(), 400'000U);
  EXPECT_NE(report.text.find("k.../999: 999 and -1\n"), std::string::npos);
  EXPECT_NE(diff(one, commit_state(2, {{"other", 1}})).text.find("state/other: nothing and 1\n"),
            std::string::npos);
}

TEST_F(Folder, NothingThatAFileSaysReachesTheTerminal) {
  const std::string escape = "\x1b[2J\xc2\x9b\n";
  std::vector<std::pair<std::string, TensorEntry>> tensors = {
      {"a" + escape + "1", {.dtype = "F32", .shape = {0}}},
      {"a" + escape + "2", {.dtype = "F32", .shape = {0}}}};
  const std::string left = path_ + "/left.safetensors";
  std::ofstream(left) << make_header(tensors, {});
  tensors.pop_back();
  const std::string right = path_ + "/right" + escape + ".safetensors";
  std::ofstream(right) << make_header(tensors, {});
  const auto expect_plain = [](const std::string& text) {
    EXPECT_EQ(text.find_first_of("\x1b\x9b"), std::string::npos) << text;
  };
  for (const std::string& text :
       {inspect(left).text, inspect(right).text, diff(left, right).text}) {
    expect_plain(text);
    EXPECT_NE(text.find("a\\x1b[2J\\xc2\\x9b\\x0a"), std::string::npos) << text;
  }
  EXPECT_NE(inspect(left).text.find("2 tensors"), std::string::npos);

  const CheckpointFolder folder(path_);
  const std::string name_now = folder.begin();
  Manifest manifest{.world_size = 1};
  manifest.files.push_back(write_file(folder.path() + "/" + name_now, "state.json",
                                      nlohmann::json{{"parts", {{escape, escape}}}}.dump()));
  folder.commit(name_now, {0, 0}, manifest);
  expect_plain(inspect(path_ + "/0-step-0").text);
  manifest.files[0].name = escape;
  folder.commit(folder.begin(), {1, 0}, manifest);
  expect_plain(inspect(path_ + "/1-step-0").text);
  expect_plain(damage_of(path_ + "/1-step-0"));
  expect_plain(inspect(path_).text);
}

TEST_F(Folder, WhatCannotBeLookedAtIsAnError) {
  fs::create_symlink(path_ + "/loop", path_ + "/loop");
  EXPECT_THROW(inspect(path_ + "/loop"), SystemError);
  EXPECT_THROW(diff(path_ + "/loop", path_ + "/loop"), SystemError);
  EXPECT_THROW(inspect(path_ + "/" + std::string(300, 'x')), SystemError);
}

// Files from strangers do no harm, whatever is in them.
TEST_F(Folder, ForeignFilesAreRefused) {
  const CheckpointFolder folder(path_);
  const std::string checkpoint = commit(folder, 0, 7);
  const std::string manifest = checkpoint + "/manifest.json";
  const auto put = [&](const std::string& file, const std::string& text) {
    fs::remove(file);
    std::ofstream(file) << text;
  };
  const std::string good = read_whole(manifest);
  for (const std::string& text : {std::string(300'000, '['), std::string("[1]"), std::string("{}"),
                                  std::string("\xff"), std::string(R"({"hash":1,"format":1})")}) {
    put(manifest, text);
    EXPECT_NE(damage_of(checkpoint), "") << text.substr(0, 20);
    EXPECT_EQ(inspect(checkpoint).code, 1);
  }
  nlohmann::json json = nlohmann::json::parse(good);
  json["files"][0]["name"] = "../../secret";
  json.erase("hash");
  Hasher hasher;
  hasher.add(json.dump());
  json["hash"] = hasher.hex();
  put(manifest, json.dump());
  EXPECT_NE(damage_of(checkpoint).find("not a file beside it"), std::string::npos);
  EXPECT_THROW(diff(checkpoint, checkpoint), UsageError);
  fs::remove(manifest);
  ASSERT_EQ(::mkfifo(manifest.c_str(), 0666), 0);
  EXPECT_NE(damage_of(checkpoint).find("is not a file"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
