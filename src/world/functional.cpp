// Each of these is linear in all ranks' inputs, so its backward is the transposed collective on the
// gradients: all_gather and reduce_scatter are each other's, the other two are their own. Backward
// is made of the same functions, which is why gradients of gradients work.
//
// Order: autograd runs the nodes that are ready in the reverse order of their making. Forward calls
// are made in one order on all ranks, and what uses the later one's result was made later still: so
// backward's collectives come in one order, too, whatever ranks do with the results.

#include <lockstep/functional.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <lockstep/error.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/purpose.h"
#include "base/text.h"
#include "world/arguments.h"

namespace lockstep::functional {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What backward needs of the call, as autograd keeps it.
struct Kept : torch::CustomClassHolder {
  Kept(World its_world, bool averages) : world(std::move(its_world)), is_average(averages) {}
  const World world;
  const bool is_average;

  static void keep(AutogradContext* context, const World& world, bool is_average = false) {
    context->saved_data["call"] =
        c10::IValue::make_capsule(c10::make_intrusive<Kept>(world, is_average));
  }
  static c10::intrusive_ptr<Kept> of(AutogradContext* context) {
    return c10::static_intrusive_pointer_cast<Kept>(context->saved_data["call"].toCapsule());
  }
};

// Gradients of gradients. The gradient that a call's backward gets depends on the call's result on
// some ranks (that of a cube) and not on others (that of a sum). Where it does, the second backward
// comes to the call again, which is collective: so it must on all ranks. Therefore each call has a
// second result, a number that is not used, and with create_graph the gradient is tied to it.
variable_list with_token(AutogradContext* context, const at::Tensor& result) {
  const at::Tensor token = at::zeros({}, result.options());
  context->save_for_backward({token});
  return {result, token};
}

struct Tie : torch::autograd::Function<Tie> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& gradient, const at::Tensor&) {
    return gradient.view_as(gradient);
  }
  static variable_list backward(AutogradContext*, const variable_list& gradients) {
    return {gradients[0], at::zeros({}, gradients[0].options())};
  }
};

at::Tensor tied(AutogradContext* context, const variable_list& gradients) {
  if (!at::GradMode::is_enabled()) return gradients[0];
  return Tie::apply(gradients[0], context->get_saved_variables()[0]);
}

ReduceOp op_of(bool is_average) { return is_average ? ReduceOp::AVG : ReduceOp::SUM; }

struct AllGather : torch::autograd::Function<AllGather> {
  static variable_list forward(AutogradContext* context, const at::Tensor& tensor,
                               const World& world) {
    Kept::keep(context, world);
    return with_token(context, world.all_gather(tensor));
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients);
};

struct ReduceScatter : torch::autograd::Function<ReduceScatter> {
  static variable_list forward(AutogradContext* context, const at::Tensor& tensor,
                               const World& world, bool is_average) {
    Kept::keep(context, world, is_average);
    return with_token(context, world.reduce_scatter(tensor, op_of(is_average)));
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const PurposeScope purpose(Purpose::kBackward);
    const auto call = Kept::of(context);
    at::Tensor all = AllGather::apply(tied(context, gradients), call->world)[0];
    if (call->is_average) all = all / call->world.size();
    return {all, {}, {}};
  }
};

variable_list AllGather::backward(AutogradContext* context, const variable_list& gradients) {
  const PurposeScope purpose(Purpose::kBackward);
  return {ReduceScatter::apply(tied(context, gradients), Kept::of(context)->world, false)[0], {}};
}

struct AllReduce : torch::autograd::Function<AllReduce> {
  static variable_list forward(AutogradContext* context, const at::Tensor& tensor,
                               const World& world, bool is_average) {
    Kept::keep(context, world, is_average);
    const at::Tensor copy = tensor.detach().clone(at::MemoryFormat::Contiguous);
    return with_token(context, world.all_reduce(copy, op_of(is_average)));
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const PurposeScope purpose(Purpose::kBackward);
    const auto call = Kept::of(context);
    return {AllReduce::apply(tied(context, gradients), call->world, call->is_average)[0], {}, {}};
  }
};

struct AllToAll : torch::autograd::Function<AllToAll> {
  static variable_list forward(AutogradContext* context, const at::Tensor& tensor,
                               const World& world) {
    Kept::keep(context, world);
    return with_token(context, world.all_to_all_async(tensor).result());
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const PurposeScope purpose(Purpose::kBackward);
    return {AllToAll::apply(tied(context, gradients), Kept::of(context)->world)[0], {}};
  }
};

enum class Parts { kNone, kOnePerRank };

// Also whether a gradient is needed must be the same on all ranks: backward is collective.
void agree(const World& world, const char* operation, const at::Tensor& tensor, Parts parts,
           const ReduceOp& op = ReduceOp::SUM) {
  const auto check = [&] {
    check_dense(world, operation, tensor, Use::kRead);
    if (parts == Parts::kOnePerRank) check_parts(world, operation, tensor);
    if (op.op_ == ReduceOp::SUM || op.op_ == ReduceOp::AVG) return;
    throw UsageError({.rank = world.global_rank(), .operation = operation},
                     text::format("functional::{} was given a reduction without a gradient.\nUse "
                                  "ReduceOp::SUM or ReduceOp::AVG, or the function of World.",
                                  operation));
  };
  agree_on_call(world, operation, check, [&] {
    const bool has_gradient = at::GradMode::is_enabled() && tensor.requires_grad();
    return text::format("{}{}, {}", describe_shape(tensor),
                        op.op_ == ReduceOp::AVG ? ", average" : "",
                        has_gradient ? "with a gradient" : "without a gradient");
  });
}

}  // namespace

at::Tensor all_gather(const at::Tensor& tensor, const World& world) {
  const PurposeScope purpose(Purpose::kWithGradients);
  agree(world, "all_gather", tensor, Parts::kNone);
  return AllGather::apply(tensor, world)[0];
}

at::Tensor all_reduce(const at::Tensor& tensor, const World& world, const ReduceOp& op) {
  const PurposeScope purpose(Purpose::kWithGradients);
  agree(world, "all_reduce", tensor, Parts::kNone, op);
  return AllReduce::apply(tensor, world, op.op_ == ReduceOp::AVG)[0];
}

at::Tensor reduce_scatter(const at::Tensor& tensor, const World& world, const ReduceOp& op) {
  const PurposeScope purpose(Purpose::kWithGradients);
  agree(world, "reduce_scatter", tensor, Parts::kOnePerRank, op);
  return ReduceScatter::apply(tensor, world, op.op_ == ReduceOp::AVG)[0];
}

at::Tensor all_to_all(const at::Tensor& tensor, const World& world) {
  const PurposeScope purpose(Purpose::kWithGradients);
  agree(world, "all_to_all", tensor, Parts::kOnePerRank);
  return AllToAll::apply(tensor, world)[0];
}

}  // namespace lockstep::functional
