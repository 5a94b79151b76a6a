#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <lockstep/error.h>
#include <lockstep/optim.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adagrad.h>
#include <torch/serialize.h>

#include <sstream>

#include "support/golden.h"
#include "support/golden_tensor.h"

namespace lockstep {
namespace {

std::vector<at::Tensor> make_parameters() {
  at::manual_seed(1);
  return {at::randn({3, 5}).requires_grad_(), at::randn({7}).requires_grad_()};
}

void draw_gradients(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    at::Tensor(parameter).mutable_grad() = at::randn(parameter.sizes());
  }
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                        const nlohmann::json& options,
                                                        const std::vector<at::Tensor>& parameters) {
  const auto set_adam = [&](auto made) {
    made.lr(options.at("lr")).weight_decay(options.value("weight_decay", made.weight_decay()));
    made.amsgrad(options.value("amsgrad", false));
    if (options.contains("betas")) {
      made.betas({options["betas"][0].get<double>(), options["betas"][1].get<double>()});
    }
    return made;
  };
  if (name == "AdamW") {
    return std::make_unique<optim::AdamW>(parameters, set_adam(torch::optim::AdamWOptions()));
  }
  if (name == "Adam") {
    return std::make_unique<optim::Adam>(parameters, set_adam(torch::optim::AdamOptions()));
  }
  auto sgd = torch::optim::SGDOptions(options.at("lr").get<double>());
  sgd.momentum(options.value("momentum", 0.0)).dampening(options.value("dampening", 0.0));
  sgd.nesterov(options.value("nesterov", false)).weight_decay(options.value("weight_decay", 0.0));
  return std::make_unique<optim::SGD>(parameters, sgd);
}

// 100 steps, each as Python's fused optimizers take it. Its sums are stored to the last digit.
TEST(Optimizers, WithoutMomentumThereIsNoState) {
  const auto parameters = make_parameters();
  optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.5));
  draw_gradients(parameters);
  optimizer.step();
  EXPECT_TRUE(optimizer.state().empty());
  std::stringstream stream;
  torch::save(optimizer, stream);
}

TEST(Optimizers, ANegativeRateIsNamed) {
  const std::vector<at::Tensor> parameters = {at::zeros({2}).requires_grad_()};
  const auto expect_named = [](const std::function<void()>& make) {
    try {
      make();
      ADD_FAILURE() << "a negative rate was taken";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("Invalid learning rate: -0.5"), std::string::npos)
          << error.what();
    }
  };
  expect_named([&] { optim::AdamW(parameters, torch::optim::AdamWOptions(-0.5)); });
  expect_named([&] { optim::Adam(parameters, torch::optim::AdamOptions(-0.5)); });
  expect_named([&] { optim::SGD(parameters, torch::optim::SGDOptions(-0.5)); });
}

TEST(Optim, StepsAsPythonsStepForStep) {
  const auto golden = test::read_golden("kit_golden.json");
  for (const auto& one : golden.at("optimizers")) {
    const auto parameters = make_parameters();
    const auto optimizer = make_optimizer(one.at("name"), one.at("options"), parameters);
    for (std::size_t step = 0; step < 100; ++step) {
      draw_gradients(parameters);
      optimizer->step();
      double sum = 0;
      for (const at::Tensor& parameter : parameters) {
        sum += parameter.detach().to(at::kDouble).sum().item<double>();
      }
      ASSERT_NEAR(sum, one.at("sums")[step].get<double>(), 1e-5) << one.at("name") << " " << step;
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto values = one.at("last")[i].get<std::vector<double>>();
      const at::Tensor expected = at::tensor(values, at::kDouble).view(parameters[i].sizes());
      EXPECT_TRUE(at::allclose(parameters[i].detach().to(at::kDouble), expected, 1e-5, 1e-6));
    }
  }
}

template <typename Ours, typename Theirs, typename Options>
void expect_same_as_libtorch(const Options& options) {
  const auto mine = make_parameters();
  const auto others = make_parameters();
  Ours ours(mine, options);
  Theirs theirs(others, options);
  for (int step = 0; step < 20; ++step) {
    at::manual_seed(100 + step);
    draw_gradients(mine);
    at::manual_seed(100 + step);
    draw_gradients(others);
    ours.step();
    theirs.step();
  }
  for (std::size_t i = 0; i < mine.size(); ++i) {
    EXPECT_TRUE(at::allclose(mine[i], others[i], 1e-5, 1e-6));
  }
  // One goes on where the other has stopped: the archives are the same.
  std::stringstream stream;
  torch::save(theirs, stream);
  torch::load(ours, stream);
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i].data().copy_(others[i].data());
  for (int step = 0; step < 5; ++step) {
    at::manual_seed(200 + step);
    draw_gradients(mine);
    at::manual_seed(200 + step);
    draw_gradients(others);
    ours.step();
    theirs.step();
  }
  for (std::size_t i = 0; i < mine.size(); ++i) {
    EXPECT_TRUE(at::allclose(mine[i], others[i], 1e-5, 1e-6));
  }
}

TEST(Optim, IsADropInForLibTorchs) {
  expect_same_as_libtorch<optim::AdamW, torch::optim::AdamW>(
      torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  expect_same_as_libtorch<optim::AdamW, torch::optim::AdamW>(
      torch::optim::AdamWOptions(1e-2).amsgrad(true));
  expect_same_as_libtorch<optim::Adam, torch::optim::Adam>(
      torch::optim::AdamOptions(1e-2).weight_decay(0.1));
  expect_same_as_libtorch<optim::SGD, torch::optim::SGD>(
      torch::optim::SGDOptions(1e-2).momentum(0.9).nesterov(true));
  expect_same_as_libtorch<optim::SGD, torch::optim::SGD>(torch::optim::SGDOptions(1e-2));
}

// Groups with options of their own, parameters without a gradient, that come later, that lie
// otherwise in memory than row by row, or with gaps.
TEST(Optim, TakesParametersAsTheyAre) {
  const auto make = [] {
    at::manual_seed(3);
    return std::vector<at::Tensor>{
        at::randn({2, 3, 4, 4}).to(at::MemoryFormat::ChannelsLast).requires_grad_(),
        at::randn({4, 6}).t().detach().requires_grad_(),
        at::randn({8, 8}).slice(1, 0, 3).detach().requires_grad_(),
        at::randn({5}).requires_grad_(),
        at::randn({5}, at::kDouble).requires_grad_(),
        at::randn({0}).requires_grad_()};
  };
  const auto groups = [](const std::vector<at::Tensor>& parameters) {
    std::vector<torch::optim::OptimizerParamGroup> made;
    made.emplace_back(std::vector<at::Tensor>(parameters.begin(), parameters.begin() + 3));
    made.emplace_back(std::vector<at::Tensor>(parameters.begin() + 3, parameters.end()),
                      std::make_unique<torch::optim::AdamWOptions>(
                          torch::optim::AdamWOptions(0.5).weight_decay(0.3)));
    return made;
  };
  const auto mine = make();
  const auto others = make();
  optim::AdamW ours(groups(mine), torch::optim::AdamWOptions(1e-2));
  torch::optim::AdamW theirs(groups(others), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < 6; ++step) {
    for (const auto* parameters : {&mine, &others}) {
      at::manual_seed(50 + step);
      for (std::size_t i = 0; i < parameters->size(); ++i) {
        at::Tensor parameter = (*parameters)[i];
        const bool is_late = i == 3 && step < 2;
        parameter.mutable_grad() =
            is_late ? at::Tensor() : at::randn(parameter.sizes(), parameter.options());
      }
    }
    ours.step();
    theirs.step();
  }
  for (std::size_t i = 0; i < mine.size(); ++i) {
    EXPECT_TRUE(at::allclose(mine[i], others[i], 1e-5, 1e-6)) << i;
    EXPECT_EQ(mine[i].strides(), others[i].strides());
  }
}

TEST(Optim, RefusesWhatItCannotDo) {
  const auto parameters = make_parameters();
  EXPECT_ANY_THROW(optim::AdamW(parameters, torch::optim::AdamWOptions(-1.0)));
  EXPECT_ANY_THROW(optim::SGD(parameters, torch::optim::SGDOptions(-1.0)));
  optim::SGD sgd(parameters, torch::optim::SGDOptions(0.1));
  at::Tensor(parameters[0]).mutable_grad() = at::zeros({3, 5}).to_sparse();
  EXPECT_THROW(sgd.step(), UsageError);
}

TEST(ClipGradNorm, IsPythons) {
  const auto golden = test::read_golden("kit_golden.json").at("clip");
  ASSERT_EQ(golden.size(), 3U);
  for (const auto& one : golden) {
    const auto parameters = make_parameters();
    draw_gradients(parameters);
    const double max_norm = one.at("max_norm");
    EXPECT_NEAR(optim::clip_grad_norm(parameters, max_norm), one.at("norm").get<double>(), 1e-5);
    EXPECT_TRUE(at::allclose(parameters[1].grad(), test::to_tensor(one.at("last")), 1e-5, 1e-7))
        << max_norm;
  }
}

TEST(ClipGradNorm, IsLibTorchs) {
  for (const double max_norm : {0.5, 3.0, 1000.0}) {
    const auto mine = make_parameters();
    const auto others = make_parameters();
    at::manual_seed(9);
    draw_gradients(mine);
    at::manual_seed(9);
    draw_gradients(others);
    const double norm = optim::clip_grad_norm(mine, max_norm);
    EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(others, max_norm), 1e-5);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_TRUE(at::allclose(mine[i].grad(), others[i].grad(), 1e-5, 1e-7));
    }
  }
  const auto parameters = make_parameters();
  EXPECT_EQ(optim::clip_grad_norm(parameters, 1), 0);  // no gradients
  EXPECT_THROW(optim::clip_grad_norm(parameters, 0), UsageError);
  EXPECT_THROW(optim::clip_grad_norm(parameters, -1), UsageError);
  draw_gradients(parameters);
  at::Tensor(parameters[0]).mutable_grad()[0][0] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isinf(optim::clip_grad_norm(parameters, 1)));
  draw_gradients(parameters);
  at::Tensor(parameters[0]).mutable_grad()[0][0] = std::numeric_limits<float>::quiet_NaN();
  try {
    optim::clip_grad_norm(parameters, 1, true);
    ADD_FAILURE();
  } catch (const UsageError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("not finite is number 0, of shape ["), std::string::npos) << text;
  }
}

TEST(Schedule, GoesAsPythons) {
  const auto golden = test::read_golden("kit_golden.json").at("schedules");
  const std::map<std::string, optim::Curve> curves = {
      {"linear", optim::linear(30, 1, 0.1)},
      {"cosine", optim::cosine(40, 0.1)},
      {"stairs", optim::stairs(7, 0.3)},
      {"one_cycle", optim::one_cycle(41)},
      {"warm_up", optim::warm_up(10, optim::cosine(30))}};
  ASSERT_EQ(curves.size(), golden.size());
  for (const auto& [name, curve] : curves) {
    optim::SGD optimizer(make_parameters(), torch::optim::SGDOptions(0.5));
    optim::Schedule schedule(optimizer, curve);
    for (const double expected : golden.at(name)) {
      EXPECT_NEAR(optimizer.param_groups()[0].options().get_lr(), expected, 1e-9)
          << name << " " << schedule.steps();
      EXPECT_EQ(schedule.lr(), optimizer.param_groups()[0].options().get_lr());
      schedule.step();
    }
  }
}

TEST(Schedule, MovesTheMomentumAsPythons) {
  const auto golden = test::read_golden("kit_golden.json").at("one_cycle_momentum");
  optim::SGD sgd(make_parameters(), torch::optim::SGDOptions(0.5));
  optim::AdamW adamw(make_parameters(), torch::optim::AdamWOptions(0.5));
  const auto momentum = optim::one_cycle_momentum(41);
  optim::Schedule first(sgd, optim::one_cycle(41), momentum);
  optim::Schedule second(adamw, optim::one_cycle(41), momentum);
  for (const double expected : golden) {
    EXPECT_NEAR(static_cast<torch::optim::SGDOptions&>(sgd.param_groups()[0].options()).momentum(),
                expected, 1e-9);
    const auto betas =
        static_cast<torch::optim::AdamWOptions&>(adamw.param_groups()[0].options()).betas();
    EXPECT_NEAR(std::get<0>(betas), expected, 1e-9);
    EXPECT_EQ(std::get<1>(betas), 0.999);
    first.step();
    second.step();
  }
  torch::optim::Adagrad adagrad(make_parameters(), torch::optim::AdagradOptions(0.5));
  EXPECT_THROW(optim::Schedule(adagrad, optim::one_cycle(41), momentum), UsageError);
}

TEST(Schedule, KeepsItsStateAndGoesOnBeyondItsEnd) {
  optim::SGD first(make_parameters(), torch::optim::SGDOptions(0.5));
  optim::Schedule schedule(first, optim::warm_up(3, optim::cosine(10, 0.2)));
  for (int i = 0; i < 7; ++i) schedule.step();
  // As a checkpoint does: the optimizer's rate is the one of the moment, the base is in the state.
  optim::SGD second(make_parameters(), torch::optim::SGDOptions(schedule.lr()));
  optim::Schedule resumed(second, optim::warm_up(3, optim::cosine(10, 0.2)));
  resumed.load_state(schedule.state());
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(resumed.lr(), schedule.lr());
    schedule.step();
    resumed.step();
  }
  EXPECT_NEAR(schedule.lr(), 0.5 * 0.2, 1e-12);
  EXPECT_THROW(resumed.load_state({.steps = 1, .base_lrs = {0.1, 0.2}}), UsageError);
  EXPECT_THROW(optim::cosine(0), UsageError);
  EXPECT_THROW(optim::warm_up(-1), UsageError);
  EXPECT_EQ(optim::one_cycle(1)(0), optim::OneCycle().last);
}

}  // namespace
}  // namespace lockstep
