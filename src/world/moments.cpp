// World::moments: each rank's mean and sum of squared distances from it, put together in the order
// of ranks (Chan, Golub and LeVeque, 1979). No sum of squares is formed: numbers far from zero keep
// their digits.

#include <ATen/ATen.h>
#include <lockstep/error.h>
#include <lockstep/world.h>

#include <algorithm>
#include <cmath>

#include "base/purpose.h"
#include "base/text.h"
#include "world/arguments.h"

namespace lockstep {
namespace {

struct Spread {
  double weight = 0;
  double mean = 0;
  double squares = 0;  // weighted, of distances from the mean

  void add(const Spread& other) {
    if (other.weight == 0) return;
    const double whole = weight + other.weight;
    const double distance = other.mean - mean;
    mean += distance * (other.weight / whole);
    squares += other.squares + distance * distance * (weight * other.weight / whole);
    weight = whole;
  }
};

void check_moments(const World& world, const at::Tensor& values, const at::Tensor& weights) {
  const auto refuse = [&](const std::string& message) {
    throw UsageError({.rank = world.global_rank(), .operation = "moments"}, message);
  };
  check_dense(world, "moments", values, Use::kRead);
  if (values.is_complex()) refuse("moments was given complex numbers.\nGive real ones.");
  if (!weights.defined()) return;
  check_dense(world, "moments", weights, Use::kRead);
  if (weights.is_complex()) refuse("moments was given complex weights.\nGive real ones.");
  if (weights.device() != values.device()) {
    refuse(
        text::format("moments was given values on {} and weights on {}.\nMove them to one device.",
                     values.device().str(), weights.device().str()));
  }
  if (weights.sizes() != values.sizes()) {
    refuse(
        text::format("moments was given values {} and weights {}.\nGive a weight for each value.",
                     describe_shape(values), describe_shape(weights)));
  }
  if (!at::logical_and(weights >= 0, at::isfinite(weights)).all().item<bool>()) {
    refuse(
        "moments was given weights that are negative or not finite.\nGive weights of 0 or more.");
  }
}

Spread spread_of(const at::Tensor& values, const at::Tensor& weights) {
  const at::Tensor wide = make_dense(values).to(at::kDouble);
  const at::Tensor shares =
      weights.defined() ? make_dense(weights).to(at::kDouble) : at::ones_like(wide);
  Spread spread;
  spread.weight = shares.sum().item<double>();
  if (spread.weight == 0) return {};
  // A value without weight does not count, also if it is not a number.
  const at::Tensor counted = wide.masked_fill(shares == 0, 0);
  spread.mean = (counted * shares).sum().item<double>() / spread.weight;
  // The mean was rounded: what that leaves is taken out again.
  const at::Tensor distances = counted - spread.mean;
  const double rest = (distances * shares).sum().item<double>();
  spread.squares =
      (distances * distances * shares).sum().item<double>() - rest * rest / spread.weight;
  return spread;
}

}  // namespace

Moments World::moments(const at::Tensor& values, const at::Tensor& weights) const {
  const PurposeScope purpose(Purpose::kMoments);
  const at::NoGradGuard no_grad;
  Spread mine;
  agree_on_call(
      *this, "moments",
      [&] {
        check_moments(*this, values, weights);
        mine = spread_of(values, weights);
      },
      [] { return std::string("numbers"); });
  at::Tensor told = at::empty({3}, at::kDouble);
  told[0] = mine.weight;
  told[1] = mine.mean;
  told[2] = mine.squares;
  const at::Tensor all = all_gather(told);
  const auto numbers = all.accessor<double, 2>();
  Spread whole;
  for (int peer = 0; peer < size(); ++peer) {
    whole.add({.weight = numbers[peer][0], .mean = numbers[peer][1], .squares = numbers[peer][2]});
  }
  if (whole.weight == 0) return {};
  return {.mean = whole.mean,
          .deviation = std::sqrt(std::max(whole.squares, 0.0) / whole.weight),
          .weight = whole.weight};
}

}  // namespace lockstep
