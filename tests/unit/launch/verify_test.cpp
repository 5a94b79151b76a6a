// `lockstep verify`: logs of hashes and checkpoints, equal, different, damaged.

#include "launch/verify.h"

#include <gtest/gtest.h>
#include <lockstep/error.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "archive/folder.h"
#include "base/text.h"
#include "support/has.h"
#include "support/temp_folder.h"

namespace lockstep::test {
namespace {

using nlohmann::json;

std::string header(const json& changes = {}) {
  json line = {{"format", "lockstep hashes"}, {"version", 1}, {"every", 100}, {"ranks", 2},
               {"logical_ranks", 8},          {"seed", 42},   {"threads", 1}, {"platform", "AVX2"}};
  line.update(changes.is_null() ? json::object() : changes);
  return line.dump() + "\n";
}

using Tensors = std::map<std::string, std::string>;

std::string entry(std::int64_t step, const Tensors& tensors, const std::string& model = "") {
  std::string hash;
  for (const auto& [name, its] : tensors) hash += its;
  return json{{"step", step}, {"model", model}, {"hash", hash}, {"tensors", tensors}}.dump() + "\n";
}

class Verify : public testing::Test {
 protected:
  std::string log(const std::string& name, const std::string& text) const {
    const std::string path = folder_.path() + "/" + name;
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  // What is said of two logs: `A` and `B` stand for their paths.
  Report compare(const std::string& one, const std::string& other) const {
    const std::string a = log("A", one);
    const std::string b = log("B", other);
    Report report = verify(a, b);
    return {shorten(report.text), report.code};
  }
  std::string refusal(const std::string& one, const std::string& other) const {
    try {
      return "not refused: " + compare(one, other).text;
    } catch (const UsageError& error) {
      return shorten(error.message());
    }
  }
  std::string shorten(std::string text) const {
    const std::string prefix = folder_.path() + "/";
    for (std::size_t at = 0; (at = text.find(prefix)) != std::string::npos;) {
      text.erase(at, prefix.size());
    }
    return text;
  }

  const Tensors first_ = {{"fc1.bias", "01"}, {"fc1.weight", "02"}, {"fc2.weight", "03"}};
  const Tensors second_ = {{"fc1.bias", "11"}, {"fc1.weight", "12"}, {"fc2.weight", "13"}};
  const Tensors third_ = {{"fc1.bias", "21"}, {"fc1.weight", "22"}, {"fc2.weight", "23"}};
  const std::string run_ = header() + entry(0, first_) + entry(100, second_) + entry(200, third_);
  const TempFolder folder_;
};

TEST_F(Verify, EqualLogs) {
  const Report report = compare(run_, run_);
  EXPECT_EQ(report.text, "equal: 3 common steps, 0 to 200\n");
  EXPECT_EQ(report.code, 0);
  // On another number of ranks, and with more steps.
  EXPECT_EQ(compare(run_, header({{"ranks", 3}, {"every", 50}}) + entry(0, first_) +
                              entry(50, third_) + entry(100, second_))
                .text,
            "equal: 2 common steps, 0 to 100\nonly in A: 1 step, 200\nonly in B: 1 step, 50\n");
}

TEST_F(Verify, TheFirstDifferenceIsNamed) {
  Tensors other = second_;
  other["fc1.weight"] = "ff";
  Report report =
      compare(run_, header() + entry(0, first_) + entry(100, other) + entry(200, first_));
  EXPECT_EQ(report.text,
            "differ: first at step 100, in fc1.weight, alone of 3 tensors; equal up to step 0\n"
            "2 of 3 common steps differ\n");
  EXPECT_EQ(report.code, 1);
  report = compare(run_, header() + entry(0, third_) + entry(100, second_));
  EXPECT_EQ(report.text,
            "differ: first at step 0, in fc1.bias (and 2 more tensors of 3); it is the first "
            "common step\n1 of 2 common steps differ\nonly in A: 1 step, 200\n");
  // Another model.
  other = first_;
  other.erase("fc1.weight");
  report = compare(run_, header() + entry(0, other));
  EXPECT_TRUE(has(report.text, "step 0, in fc1.weight, alone of 3")) << report.text;
}

TEST_F(Verify, AModelThatOneRunHasAloneIsAnError) {
  const std::string actor = entry(0, first_, "actor");
  const auto says = [&](const std::string& left, const std::string& right) {
    try {
      compare(left, right);
    } catch (const UsageError& error) {
      return error.message();
    }
    return std::string("nothing");
  };
  const std::string text = says(header() + actor + entry(0, first_, "critic"), header() + actor);
  EXPECT_TRUE(has(text, "different models (DdpOptions::name): 'actor', 'critic' and 'actor'"))
      << text;
}

TEST_F(Verify, WhatExplainsADifferenceIsSaid) {
  const std::string steps = entry(0, first_);
  EXPECT_EQ(compare(header() + steps, header({{"seed", 43}, {"threads", 2}}) + steps).text,
            "equal: 1 common step, 0\n"
            "warning: the number of threads is 1 in A, 2 in B: results depend on it\n"
            "warning: the seed is 42 in A, 43 in B: results depend on it\n");
  EXPECT_TRUE(has(compare(header() + steps, header({{"platform", "AVX512"}}) + steps).text,
                  "the platform is AVX2 in A, AVX512 in B"));
  EXPECT_TRUE(has(compare(header() + steps, header({{"logical_ranks", 4}}) + steps).text,
                  "the number of logical ranks is 8 in A, 4 in B"));
  const std::string text = compare(header({{"logical_ranks", 0}}) + steps,
                                   header({{"logical_ranks", 0}, {"ranks", 3}}) + steps)
                               .text;
  EXPECT_TRUE(has(text, "the number of ranks is 2 in A, 3 in B")) << text;
  // The largest seed there is.
  const std::string large = header({{"seed", 18446744073709551615ULL}}) + steps;
  EXPECT_EQ(compare(large, large).code, 0);
}

TEST_F(Verify, SeveralModels) {
  const auto both = [&](const Tensors& critic) {
    return header() + entry(0, first_, "actor") + header() + entry(0, critic, "critic");
  };
  EXPECT_EQ(compare(both(first_), both(first_)).text, "equal: 1 common step, 0\n");
  EXPECT_EQ(compare(both(first_), both(third_)).text,
            "differ: first at step 0, in fc1.bias (and 2 more tensors of 3) of model critic; it is "
            "the first common step\n1 of 1 common steps differ\n");
  EXPECT_TRUE(has(refusal(both(first_), run_), "different models"));
}

TEST_F(Verify, ARunThatWasResumedCountsOnce) {
  const std::string again = header({{"ranks", 3}}) + entry(100, second_) + entry(200, third_);
  EXPECT_EQ(compare(run_ + again, run_).text, "equal: 3 common steps, 0 to 200\n");
  // The later entry counts, and that they differ is said.
  const std::string wrong = header() + entry(0, first_) + entry(100, third_) + entry(200, third_);
  Report report = compare(wrong + again, run_);
  EXPECT_EQ(report.text,
            "equal: 3 common steps, 0 to 200, but A has step 100 twice, with different hashes\n");
  EXPECT_EQ(report.code, 1);
  report = compare(run_, run_ + header() + entry(100, third_) + entry(200, second_));
  EXPECT_TRUE(has(report.text, "differ: first at step 100")) << report.text;
  EXPECT_TRUE(has(report.text, "B has step 100 twice, with different hashes (and 1 more steps)"))
      << report.text;
}

TEST_F(Verify, ALineThatWasCutOffIsIgnored) {
  const std::string line = entry(300, first_);
  for (const std::size_t length : {std::size_t{1}, line.size() / 2, line.size() - 2}) {
    const std::string half = line.substr(0, length);
    EXPECT_EQ(compare(run_ + half, run_).text,
              "equal: 3 common steps, 0 to 200\nA: the last line is incomplete and was ignored: "
              "the run was killed, or found no room\n");
    const std::string text = compare(run_, run_ + half + "\n" + header() + line).text;
    EXPECT_TRUE(has(text, "B: line 5 is incomplete and was ignored")) << text;
    EXPECT_TRUE(has(text, "only in B: 1 step, 300")) << text;
  }
  // Whole, but for its end.
  EXPECT_EQ(compare(run_ + line.substr(0, line.size() - 1), run_ + line).text,
            "equal: 4 common steps, 0 to 300\n");
}

TEST_F(Verify, GarbageIsRefusedWithItsLine) {
  for (const std::string& garbage :
       {std::string("garbage\n"), std::string("\n"), std::string("[1]\n"), std::string("{}\n"),
        std::string("\xff\xfe\n"), std::string(100'000, '[') + "\n",
        std::string(R"({"step":"x","model":"","hash":"0","tensors":{}})") + "\n",
        std::string(R"({"step":1e300,"model":"","hash":"0","tensors":{}})") + "\n",
        std::string(R"({"step":1,"model":"","hash":"0","tensors":[1]})") + "\n",
        std::string(R"({"step":1,"hash":"0"})") + "\n"}) {
    const std::string text = refusal(run_ + garbage + entry(300, first_), run_);
    EXPECT_TRUE(has(text, "A, line 5 is not as lockstep writes it")) << text << garbage;
    EXPECT_TRUE(has(refusal(run_, run_ + garbage), "B, line 5")) << garbage;
  }
  EXPECT_TRUE(has(refusal(run_, "what"), "B is not a log of hashes"));
  EXPECT_TRUE(has(refusal("", run_), "A is not a log of hashes"));
  EXPECT_TRUE(has(refusal(run_, entry(0, first_)), "B is not a log of hashes"));
  EXPECT_TRUE(has(refusal(run_, R"({"format":"else"})"), "B is not a log of hashes"));
  EXPECT_TRUE(has(refusal(run_, header({{"version", 2}})), "B has version 2"));
  EXPECT_TRUE(has(refusal(run_, header({{"seed", -1}})), "B, line 1"));
}

TEST_F(Verify, WhatCannotBeComparedIsAnError) {
  EXPECT_TRUE(has(refusal(run_, header() + entry(50, first_)),
                  "no common step: A has 3 steps, 0 to 200, B has 1 step, 50"));
  EXPECT_TRUE(has(refusal(run_, header()), "B has no step"));
  const std::string a = log("A", run_);
  EXPECT_THROW(verify(a, folder_.path() + "/missing"), SystemError);
  EXPECT_THROW(verify(folder_.path() + "/missing", a), SystemError);
  EXPECT_THROW(verify(a, folder_.path()), UsageError);
  EXPECT_THROW(verify(folder_.path(), folder_.path()), UsageError);  // no checkpoint in it
}

TEST_F(Verify, NothingThatAFileSaysReachesTheTerminal) {
  Tensors strange = first_;
  strange["\x1b[2J"] = "04";
  const Report report = compare(run_, header() + entry(0, strange));
  EXPECT_TRUE(has(report.text, "\\x1b[2J")) << report.text;
  EXPECT_FALSE(has(report.text, "\x1b"));
}

// A checkpoint as a Checkpointer writes it, with `num_ranks` files.
struct Saved {
  std::map<std::string, std::string> tensors = {{"model.w", "12345678"}, {"optimizer.m", "abcd"}};
  json parts = {{"schedule", {{"steps", 7}}}};
  int num_ranks = 1;
  std::string own = "x";  // of each rank
};

class VerifyCheckpoints : public Verify {
 protected:
  std::string save(const std::string& folder, std::int64_t number, std::int64_t step,
                   const Saved& saved) const {
    const CheckpointFolder checkpoints(folder_.path() + "/" + folder);
    const std::string unfinished = checkpoints.begin();
    const std::string path = checkpoints.path() + "/" + unfinished;
    const auto write = [&](const std::string& name, const std::map<std::string, std::string>& all,
                           const std::string& type) {
      std::vector<std::pair<std::string, TensorEntry>> tensors;
      std::string bytes;
      for (const auto& [its_name, its] : all) {
        const int size = bytes_of_dtype(type);
        tensors.push_back({its_name,
                           {.dtype = type,
                            .shape = {static_cast<std::int64_t>(its.size()) / size},
                            .bytes = its.size()}});
        bytes += its;
      }
      const std::string start = make_header(tensors, {});
      return write_file(path, name, start + bytes);
    };
    Manifest manifest{.step = step, .world_size = saved.num_ranks};
    const auto ranks = static_cast<std::size_t>(saved.num_ranks);
    json parts = saved.parts;
    parts["random"] = {{"random.cpu", {saved.num_ranks, 4}}};
    parts["simulator"] = {{"lengths", std::vector<int>(ranks, 1)}};
    std::string texts;
    for (std::size_t rank = 0; rank < ranks; ++rank) texts += saved.own;
    auto of_ranks = saved.tensors;
    manifest.files.push_back(write("tensors-0-of-2.safetensors", of_ranks, "F32"));
    of_ranks = {{"random.cpu", texts + "1234"}, {"simulator.texts", texts + "0"}};
    manifest.files.push_back(write("tensors-1-of-2.safetensors", of_ranks, "U8"));
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      manifest.files.push_back(write(text::format("rank-{}-of-{}.safetensors", rank, ranks),
                                     {{text::format("rank{}.residual", rank), saved.own}}, "U8"));
    }
    const json state = {
        {"version", 1}, {"step", step}, {"world_size", saved.num_ranks}, {"parts", parts}};
    manifest.files.push_back(write_file(path, "state.json", state.dump()));
    const CheckpointName name{number, step};
    checkpoints.commit(unfinished, name, manifest);
    return checkpoints.path() + "/" + name.text();
  }
  Report compare_folders() const {
    const Report report = verify(folder_.path() + "/a", folder_.path() + "/b");
    return {shorten(report.text), report.code};
  }
};

TEST_F(VerifyCheckpoints, RanksThatSavedThemDoNotMatter) {
  const std::string one = save("a", 0, 100, {});
  const std::string two = save("b", 3, 100, {.num_ranks = 3, .own = "y"});
  EXPECT_EQ(verify(one, two).text, "equal: 1 common step, 100\n");
  EXPECT_EQ(verify(one, two).code, 0);
  EXPECT_EQ(diff(one, two).code, 1);  // which compares everything
}

TEST_F(VerifyCheckpoints, TheFirstStepThatDiffersIsNamed) {
  save("a", 0, 100, {});
  save("a", 1, 200, {});
  save("a", 2, 300, {});
  save("b", 0, 100, {});
  EXPECT_EQ(compare_folders().text, "equal: 1 common step, 100\nonly in a: 2 steps, 200 to 300\n");
  save("b", 1, 200, {.tensors = {{"model.w", "12345679"}, {"optimizer.m", "abcd"}}});
  save("b", 2, 300, {.tensors = {{"model.w", "99999999"}, {"optimizer.m", "abcd"}}});
  Report report = compare_folders();
  EXPECT_TRUE(report.text.starts_with(
      "differ: first at step 200, in model.w, alone of 2 tensors; equal up to step 100\n"
      "  model.w: 1 of 2 values differ, by up to "))
      << report.text;
  EXPECT_EQ(report.code, 1);
  // A newer one of the same step counts.
  save("b", 3, 200, {});
  report = compare_folders();
  EXPECT_TRUE(has(report.text, "first at step 300")) << report.text;
  EXPECT_EQ(verify(folder_.path() + "/a/1-step-200", folder_.path() + "/b").text,
            "equal: 1 common step, 200\nonly in " + folder_.path() + "/b: 2 steps, 100 to 300\n");
}

TEST_F(VerifyCheckpoints, ShapesAndValuesAreCompared) {
  save("a", 0, 100, {});
  save("b", 0, 100, {.tensors = {{"model.w", "1234"}, {"optimizer.n", "abcd"}}});
  EXPECT_EQ(compare_folders().text,
            "differ: first at step 100, in model.w (and 2 more tensors of 3); it is the first "
            "common step\n  model.w: F32 [2] and F32 [1]\n"
            "  only in a/0-step-100: optimizer.m F32 [1]\n"
            "  only in b/0-step-100: optimizer.n F32 [1]\n");
  save("b", 1, 100, {.parts = {{"schedule", {{"steps", 8}}}}});
  EXPECT_EQ(compare_folders().text,
            "differ: first at step 100, in state/parts/schedule/steps; it is the first common "
            "step\n  state/parts/schedule/steps: 7 and 8\n");
}

TEST_F(VerifyCheckpoints, DamagedOnesAreNotCompared) {
  const std::string one = save("a", 0, 100, {});
  const std::string two = save("b", 0, 100, {});
  std::filesystem::resize_file(two + "/tensors-0-of-2.safetensors", 50);
  try {
    verify(one, two);
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_TRUE(has(error.message(), "is not whole: tensors-0-of-2.safetensors has 50 bytes"))
        << error.message();
  }
  const std::string later = save("b", 1, 200, {});
  EXPECT_THROW(verify(one, later), UsageError);  // another step
}

}  // namespace
}  // namespace lockstep::test
