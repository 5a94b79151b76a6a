// send and recv: two messages of the engine for one of the caller. The first says what the tensor
// is, so that the receiver compares instead of writing bytes of another type or size.

#include <ATen/ATen.h>
#include <lockstep/error.h>
#include <lockstep/world.h>

#include <algorithm>
#include <array>

#include "base/text.h"
#include "world/arguments.h"
#include "world/pending.h"

namespace lockstep {
namespace {

constexpr int kMaxTag = 32767;  // what every engine has
constexpr std::size_t kMaxDims = 14;

// The type, the kind of device, the number of dimensions, and the sizes.
constexpr std::int64_t kHeaderNumbers = 3 + kMaxDims;

at::Tensor header_of(const at::Tensor& tensor) {
  at::Tensor header = at::zeros({kHeaderNumbers}, at::kLong);
  auto* numbers = header.mutable_data_ptr<std::int64_t>();
  numbers[0] = static_cast<std::int64_t>(tensor.scalar_type());
  numbers[1] = static_cast<std::int64_t>(tensor.device().type());
  numbers[2] = tensor.dim();
  std::ranges::copy(tensor.sizes(), numbers + 3);
  return header;
}

struct Sent {
  at::ScalarType type;
  at::DeviceType device;
  std::vector<std::int64_t> sizes;

  bool is_like(const at::Tensor& tensor) const {
    return type == tensor.scalar_type() && device == tensor.device().type() &&
           sizes == tensor.sizes();
  }
};

Sent read_header(const at::Tensor& header) {
  const auto* numbers = header.const_data_ptr<std::int64_t>();
  return {static_cast<at::ScalarType>(numbers[0]),
          static_cast<at::DeviceType>(numbers[1]),
          {numbers + 3, numbers + 3 + numbers[2]}};
}

// What the engine is given: engines differ in the types that they take, but all take bytes.
at::Tensor bytes_of(const at::Tensor& dense) { return dense.view(-1).view(at::kByte); }

void check_message(const World& world, const char* operation, const at::Tensor& tensor, Use use,
                   int peer, int tag) {
  check_dense(world, operation, tensor, use);
  std::string problem;
  if (peer == world.rank()) {
    problem = text::format("rank {}, which is this rank itself.\nSend to another rank", peer);
  } else if (peer < 0 || peer >= world.size()) {
    problem = text::format("rank {} in a world of {}.\nGive a rank from 0 to {}", peer,
                           world.size(), world.size() - 1);
  } else if (tag < 0 || tag > kMaxTag) {
    problem = text::format("tag {}.\nGive one from 0 to {}", tag, kMaxTag);
  } else if (tensor.sizes().size() > kMaxDims) {
    problem = text::format("a tensor of {} dimensions.\nReshape it to at most {}", tensor.dim(),
                           kMaxDims);
  } else {
    return;
  }
  throw UsageError({.rank = world.global_rank(), .operation = operation},
                   text::format("{} was given {}.", operation, problem));
}

void compare(const World& world, const at::Tensor& tensor, const at::Tensor& header, int from) {
  const Sent sent = read_header(header);
  if (sent.is_like(tensor)) return;
  const int sender = world.global_rank(from);
  throw MismatchError({.rank = world.global_rank(), .peer = sender, .operation = "recv"},
                      text::format("recv was given {} on rank {}, but rank {} sent {}[{}]{}.\n"
                                   "Receive into a tensor of the same sizes, type and device.",
                                   describe_shape(tensor), world.global_rank(), sender,
                                   c10::toString(sent.type), text::join(sent.sizes, ", "),
                                   sent.device == tensor.device().type()
                                       ? std::string()
                                       : " on " + c10::DeviceTypeName(sent.device, true)));
}

}  // namespace

Pending World::send_async(const at::Tensor& tensor, int to, int tag) const {
  check_message(*this, "send", tensor, Use::kRead, to, tag);
  std::vector<at::Tensor> header = {header_of(tensor)};
  std::vector<at::Tensor> bytes = {bytes_of(make_dense(tensor))};
  return start("send", tensor,
               [&] {
                 return Works{{backend()->send(header, to, tag)},
                              {backend()->send(bytes, to, tag), tensor.device().type()}};
               },
               {});
}

void World::send(const at::Tensor& tensor, int to, int tag) const {
  send_async(tensor, to, tag).wait();
}

Pending World::recv_async(const at::Tensor& tensor, int from, int tag) const {
  check_message(*this, "recv", tensor, Use::kWritten, from, tag);
  std::vector<at::Tensor> header = {header_of(tensor)};
  at::Tensor dense = make_dense(tensor);
  std::vector<at::Tensor> bytes = {bytes_of(dense)};
  return start(
      "recv", tensor,
      [&] {
        return Works{{backend()->recv(header, from, tag)},
                     {backend()->recv(bytes, from, tag), tensor.device().type()}};
      },
      [world = *this, tensor, told = header[0], from, done = write_back(tensor, dense)] {
        compare(world, tensor, told, from);
        return done();
      });
}

// What does not fit is received, too, and thrown away: the next message then finds its own.
at::Tensor World::recv(const at::Tensor& tensor, int from, int tag) const {
  check_message(*this, "recv", tensor, Use::kWritten, from, tag);
  std::vector<at::Tensor> header = {header_of(tensor)};
  start("recv", tensor, [&] { return Works{{backend()->recv(header, from, tag)}}; }, {}).wait();
  const Sent sent = read_header(header[0]);
  const at::Tensor dense =
      sent.is_like(tensor)
          ? make_dense(tensor)
          : at::empty(sent.sizes, at::TensorOptions(sent.type).device(at::Device(sent.device)));
  std::vector<at::Tensor> bytes = {bytes_of(dense)};
  start("recv", tensor,
        [&] {
          return Works{{backend()->recv(bytes, from, tag), sent.device}};
        },
        {})
      .wait();
  compare(*this, tensor, header[0], from);
  const at::NoGradGuard no_grad;
  return write_back(tensor, dense)();
}

}  // namespace lockstep
