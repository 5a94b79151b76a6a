// Golden values that are tensors.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <vector>

namespace lockstep::test {

inline at::Tensor to_tensor(const nlohmann::json& value) {
  if (!value.is_array()) return at::scalar_tensor(value.get<double>(), at::kDouble).to(at::kFloat);
  std::vector<at::Tensor> parts;
  for (const auto& part : value) parts.push_back(to_tensor(part));
  return at::stack(parts);
}

inline void expect_close(const at::Tensor& actual, const nlohmann::json& expected) {
  EXPECT_TRUE(at::allclose(actual.to(at::kFloat), to_tensor(expected), 1e-6, 1e-7))
      << actual << "\nexpected\n"
      << to_tensor(expected);
}

}  // namespace lockstep::test
