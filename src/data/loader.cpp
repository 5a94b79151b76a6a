#include <ATen/ATen.h>
#include <lockstep/data.h>
#include <lockstep/error.h>

#include <chrono>
#include <exception>
#include <map>
#include <thread>
#include <variant>

#include "base/mutex.h"
#include "base/text.h"

namespace lockstep {

// Batches have numbers in the order of the sampler's draws. A worker takes the next number and its
// indices under the lock, prepares the batch without it, and puts it down; the caller takes batches
// in the order of numbers. Workers live for one epoch, and draw from a copy of the sampler: the
// program's own knows of what was handed out only.
struct Loader::Impl {
  struct Prepared {
    std::variant<Batch, std::exception_ptr> result;
    std::size_t num_samples = 0;
  };

  // Constant after construction.
  std::shared_ptr<const Dataset> dataset;
  LoaderOptions options;

  // The caller's own.
  std::variant<DistributedSampler, EvalSampler> sampler;  // the program's: what was handed out
  std::int64_t pass = 0;                                  // of it, that workers draw for
  double waited_ms = 0;

  bool has_begun = false;
  std::vector<std::thread> workers;

  Mutex mutex;
  std::optional<std::variant<DistributedSampler, EvalSampler>> ahead
      LOCKSTEP_GUARDED_BY(mutex);  // draws
  Condition changed;
  std::map<std::size_t, Prepared> ready LOCKSTEP_GUARDED_BY(mutex);
  std::size_t next_number LOCKSTEP_GUARDED_BY(mutex) = 0;       // to be drawn
  std::size_t next_taken LOCKSTEP_GUARDED_BY(mutex) = 0;        // to be handed out
  std::optional<std::size_t> total LOCKSTEP_GUARDED_BY(mutex);  // batches, once that is known
  bool is_stopping LOCKSTEP_GUARDED_BY(mutex) = false;

  Impl(std::shared_ptr<const Dataset> its_dataset, const LoaderOptions& its_options,
       std::variant<DistributedSampler, EvalSampler> its_sampler)
      : dataset(std::move(its_dataset)), options(its_options), sampler(std::move(its_sampler)) {}
  ~Impl() { stop(); }

  std::optional<std::vector<std::size_t>> draw() LOCKSTEP_REQUIRES(mutex) {
    return std::visit([&](auto& one) { return one.next(options.batch_size); }, *ahead);
  }

  // A sampler of the workers' own: the program's may be set to another epoch while they draw.
  std::variant<DistributedSampler, EvalSampler> begin_pass() {
    if (auto* const shared = std::get_if<DistributedSampler>(&sampler)) {
      auto [own, its_pass] = shared->begin_pass();
      pass = its_pass;
      return std::move(own);
    }
    EvalSampler own = std::get<EvalSampler>(sampler);
    own.reset();
    return own;
  }

  void stop() {
    {
      const MutexLock lock(mutex);
      is_stopping = true;
    }
    changed.notify_all();
    for (std::thread& worker : workers) worker.join();
    workers.clear();
    const MutexLock lock(mutex);
    ready.clear();
    is_stopping = false;
  }

  void begin() {
    stop();
    auto own = begin_pass();
    {
      const MutexLock lock(mutex);
      ahead = std::move(own);
      next_number = next_taken = 0;
      total.reset();
    }
    waited_ms = 0;
    has_begun = true;
    for (int i = 0; i < options.threads; ++i) workers.emplace_back([this] { work(); });
  }

  Prepared prepare(const std::vector<std::size_t>& indices) const {
    try {
      const at::NoGradGuard no_grad;
      Batch batch = dataset->get_batch(indices);
      batch.indices = indices;
      return {std::move(batch), indices.size()};
    } catch (...) {
      return {std::current_exception(), indices.size()};
    }
  }

  void work() {
    const MutexLock lock(mutex);
    while (true) {
      while (!is_stopping && !total &&
             next_number >= next_taken + static_cast<std::size_t>(options.ahead)) {
        changed.wait(mutex);
      }
      if (is_stopping || total) return;
      const auto indices = draw();
      if (!indices) {
        total = next_number;
        changed.notify_all();
        return;
      }
      const std::size_t number = next_number++;
      Prepared prepared;
      {
        const MutexUnlock free(mutex);
        prepared = prepare(*indices);
      }
      ready.emplace(number, std::move(prepared));
      changed.notify_all();
    }
  }

  std::optional<Prepared> take() {
    const MutexLock lock(mutex);
    if (options.threads == 0) {
      const auto indices = draw();
      if (!indices) return std::nullopt;
      return prepare(*indices);
    }
    // A worker is always on its way to the next one: what it waits for is the data set's own.
    while (!ready.contains(next_taken) && total != next_taken) changed.wait(mutex);
    if (total == next_taken) return std::nullopt;
    Prepared prepared = std::move(ready.extract(next_taken).mapped());
    ++next_taken;
    changed.notify_all();
    return prepared;
  }
};

namespace {

void check(const std::shared_ptr<const Dataset>& dataset, const LoaderOptions& options,
           std::size_t num_sampled) {
  const auto refuse = [](const std::string& message) {
    throw UsageError({.operation = "Loader"}, message);
  };
  if (!dataset) refuse("There is no data set: the pointer is empty.\nMake it first.");
  if (options.batch_size < 1 || options.threads < 0 || options.ahead < 1) {
    refuse(
        text::format("The options are batch_size {}, threads {}, ahead {}.\nGive a batch size and "
                     "ahead from 1, threads from 0.",
                     options.batch_size, options.threads, options.ahead));
  }
  if (num_sampled != dataset->size()) {
    refuse(
        text::format("The sampler draws from {} samples, the data set has {}.\nMake the "
                     "sampler with the data set's size.",
                     num_sampled, dataset->size()));
  }
}

}  // namespace

Loader::Loader(std::shared_ptr<const Dataset> dataset, DistributedSampler sampler,
               const LoaderOptions& options) {
  check(dataset, options, sampler.num_samples());
  if (options.batch_size > sampler.samples_per_epoch()) {
    throw UsageError(
        {.operation = "Loader"},
        text::format("A batch has {} samples, but this rank has only {} in an epoch.\nUse "
                     "smaller batches or fewer ranks.",
                     options.batch_size, sampler.samples_per_epoch()));
  }
  impl_ = std::make_unique<Impl>(std::move(dataset), options, std::move(sampler));
}

Loader::Loader(std::shared_ptr<const Dataset> dataset, EvalSampler sampler,
               const LoaderOptions& options) {
  check(dataset, options, sampler.num_samples());
  impl_ = std::make_unique<Impl>(std::move(dataset), options, std::move(sampler));
}

Loader::~Loader() = default;
Loader::Loader(Loader&&) noexcept = default;
Loader& Loader::operator=(Loader&&) noexcept = default;

Loader::iterator Loader::begin() {
  impl_->begin();
  return iterator(this);
}

std::optional<Batch> Loader::next() {
  if (!impl_->has_begun) impl_->begin();
  const auto start = std::chrono::steady_clock::now();
  auto prepared = impl_->take();
  impl_->waited_ms +=
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  if (!prepared) {
    impl_->has_begun = false;
    return std::nullopt;
  }
  // A bad one, too: a resume goes on behind it.
  if (auto* const sampler = std::get_if<DistributedSampler>(&impl_->sampler)) {
    sampler->use(prepared->num_samples, impl_->pass);
  }
  if (auto* error = std::get_if<std::exception_ptr>(&prepared->result)) {
    std::rethrow_exception(*error);
  }
  return std::get<Batch>(std::move(prepared->result));
}

SamplerState Loader::state() const {
  const auto* sampler = std::get_if<DistributedSampler>(&impl_->sampler);
  return sampler == nullptr ? SamplerState{} : sampler->state();
}

void Loader::load_state(const SamplerState& state) {
  auto* const sampler = std::get_if<DistributedSampler>(&impl_->sampler);
  if (sampler != nullptr) sampler->load_state(state);
  impl_->stop();
  impl_->has_begun = false;
}

double Loader::waiting_ms() const { return impl_->waited_ms; }

}  // namespace lockstep
