// What the collectives of a World check of their arguments, and make of them for the engine.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/world.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

// These throw UsageError on this rank. check_dense also if the engine does not take the device.
enum class Use { kRead, kWritten };
void check_dense(const World& world, const char* operation, const at::Tensor& tensor, Use use);
void check_root(const World& world, const char* operation, int root);
// One part per rank along the first dimension.
void check_parts(const World& world, const char* operation, const at::Tensor& tensor);

// Contiguous, with a pending conjugation or negation carried out, and without a gradient.
at::Tensor make_dense(const at::Tensor& tensor);
// Returns `tensor` after it has got what is in its dense copy, if that is another one.
std::function<at::Tensor()> write_back(const at::Tensor& tensor, const at::Tensor& dense);
// The sizes of all ranks' tensors along a new first dimension.
std::vector<std::int64_t> stacked(const World& world, const at::Tensor& tensor);

// Throws the same on all ranks if `check` throws on one of them, or if `call` is not the
// same text on all: "Float[3, 4], root 1". Collective, and the world stays usable. Returns `number`
// of all ranks.
std::vector<std::int64_t> agree_on_call(const World& world, const char* operation,
                                        const std::function<void()>& check,
                                        const std::function<std::string()>& call,
                                        std::int64_t number = 0);
// "Float[3, 4]", and "Float[3, 4] on cuda" if it is not on the CPU.
std::string describe_shape(const at::Tensor& tensor);
std::string describe_shape(const at::Tensor& tensor, at::IntArrayRef sizes);

}  // namespace lockstep
