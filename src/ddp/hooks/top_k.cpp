// Top-k: of each bucket a rank sends its largest elements only, with their places.
//
// What a rank does not send it adds to the next step's gradient (error feedback): nothing is lost,
// only late. The mean is over what was sent, summed in the order of ranks, so it has the same bits
// everywhere. A step in which any rank sent inf or NaN is one that programs throw away (loss
// scaling does); it leaves every rank's memory as it was, else a few of them would last for ever.

#include <ATen/ATen.h>
#include <lockstep/error.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <utility>

#include "base/text.h"
#include "ddp/hooks/comm_hooks.h"

namespace lockstep {
namespace {

// One message: the values, then their places. Fresh memory for each part, since its type may need
// another alignment than its place in the message has.
at::Tensor pack(const at::Tensor& values, const at::Tensor& places) {
  return at::cat({values.view(at::kByte), places.view(at::kByte)});
}
at::Tensor unpack(const at::Tensor& message, std::int64_t begin, std::int64_t count,
                  at::ScalarType type) {
  const auto item_bytes = static_cast<std::int64_t>(c10::elementSize(type));
  return message.narrow(0, begin, count * item_bytes).clone().view(type);
}

// The places of the k largest; NaN is larger than all. at::topk sorts pairs, ten times slower than
// reading: so a sample tells how large the k-th may be at least, and only what is not below takes
// part. Where the sample was wrong, and too little is left, all do. On a device the host would have
// to wait for what is left.
at::Tensor places_of_largest(const at::Tensor& magnitudes, std::int64_t k) {
  const auto top = [](const at::Tensor& values, std::int64_t count) {
    return at::topk(values, count, 0, true, false);
  };
  constexpr std::int64_t kStride = 61;  // prime: no column of a matrix
  const std::int64_t num_sampled = k / kStride * 5 / 4 + 32;
  const at::Tensor sample = magnitudes.slice(0, 0, std::nullopt, kStride);
  if (magnitudes.is_cpu() && num_sampled < sample.numel() / 2) {
    const at::Tensor bound = std::get<0>(top(sample, num_sampled)).min();
    const at::Tensor places = magnitudes.lt(bound).logical_not_().nonzero().view(-1);
    if (places.numel() >= k) {
      const at::Tensor values = magnitudes.index_select(0, places);
      return places.index_select(0, std::get<1>(top(values, k)));
    }
  }
  return std::get<1>(top(magnitudes, k));
}

class TopKHook : public CommHook {
 public:
  explicit TopKHook(const TopKOptions& options) : options_(options) {
    if (options_.fraction > 0 && options_.fraction <= 1) return;
    throw UsageError(
        {.operation = "top_k_hook"},
        text::format("TopKOptions::fraction is {}.\nGive a number above 0 and up to 1, "
                     "such as 0.01.",
                     options_.fraction));
  }

  std::string text() const override {
    return text::format("top_k(fraction={}, error_feedback={})", options_.fraction,
                        options_.error_feedback);
  }

  std::function<void()> start(GradBucket bucket, HookComm& comm) override {
    const at::NoGradGuard no_grad;
    const at::Tensor flat =
        bucket.flat.is_complex() ? at::view_as_real(bucket.flat).view(-1) : bucket.flat;
    const std::int64_t num_elements = flat.numel();
    if (num_elements == 0) return [] {};

    // 16-bit gradients are added up in f32; what rounding takes from them is left over as well.
    const at::ScalarType type = flat.scalar_type();
    const at::ScalarType wide = type == at::kDouble ? at::kDouble : at::kFloat;
    const std::shared_ptr<at::Tensor> memory = memory_of(bucket, num_elements, wide);
    at::Tensor total = flat.to(wide);
    if (memory->defined()) {
      total = total + memory->to(flat.device());
    } else if (options_.error_feedback && total.is_same(flat)) {
      total = total.clone();  // becomes what is left over
    }

    const std::int64_t k = std::clamp<std::int64_t>(
        static_cast<std::int64_t>(options_.fraction * static_cast<double>(num_elements)), 1,
        num_elements);
    const at::Tensor places = places_of_largest(total.abs(), k);
    const at::Tensor values = total.index_select(0, places).to(type);
    if (options_.error_feedback) total.index_add_(0, places, values.to(wide), -1);

    const at::ScalarType place_type =
        num_elements <= std::numeric_limits<std::int32_t>::max() ? at::kInt : at::kLong;
    at::Tensor messages;
    auto work = comm.all_gather(pack(values, places.to(place_type)), messages);
    return [=, left_over = total, keeps = options_.error_feedback] {
      const at::NoGradGuard no_grad_later;
      work->wait();
      const at::Tensor sum = type == wide ? flat : at::empty_like(flat, wide);
      sum.zero_();
      at::Tensor is_finite = at::ones({}, flat.options().dtype(at::kBool));
      for (const at::Tensor& message : messages.unbind()) {
        const at::Tensor their_values = unpack(message, 0, k, type);
        const auto value_bytes = static_cast<std::int64_t>(their_values.nbytes());
        sum.index_add_(0, unpack(message, value_bytes, k, place_type), their_values.to(wide));
        is_finite = is_finite.logical_and(at::isfinite(their_values).all());
      }
      sum.div_(messages.size(0));
      if (!sum.is_same(flat)) flat.copy_(sum);
      if (!keeps) return;
      if (flat.is_cpu()) {
        if (is_finite.item<bool>()) *memory = left_over;
      } else {  // known to the device alone
        *memory = at::where(is_finite, left_over,
                            memory->defined() ? *memory : at::zeros_like(left_over));
      }
    };
  }

  HookState state() const override {
    HookState all;
    for (const auto& [index, memory] : memories_) {
      if (memory->defined()) all[std::to_string(index)] = *memory;
    }
    return all;
  }

  void load_state(const HookState& state, int epoch) override {
    memories_.clear();
    epoch_ = epoch;
    for (const auto& [index, memory] : state) {
      memories_[std::atoi(index.c_str())] = std::make_shared<at::Tensor>(memory);
    }
  }

 private:
  // Undefined before the first step. Owned together with the function that start() returned, which
  // may outlive its entry here.
  std::shared_ptr<at::Tensor> memory_of(const GradBucket& bucket, std::int64_t num_elements,
                                        at::ScalarType type) {
    if (bucket.epoch != epoch_) memories_.clear();
    epoch_ = bucket.epoch;
    std::shared_ptr<at::Tensor>& memory = memories_[bucket.index];
    if (!memory ||
        (memory->defined() && (memory->numel() != num_elements || memory->scalar_type() != type))) {
      memory = std::make_shared<at::Tensor>();
    }
    return memory;
  }

  const TopKOptions options_;
  int epoch_ = 0;
  std::map<int, std::shared_ptr<at::Tensor>> memories_;  // by bucket: what was not sent
};

}  // namespace

std::shared_ptr<CommHook> top_k_hook(const TopKOptions& options) {
  return std::make_shared<TopKHook>(options);
}

}  // namespace lockstep
