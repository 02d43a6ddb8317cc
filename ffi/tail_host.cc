// The XLA FFI custom call `k3jax_tail` on CPU devices: the fused tail's protocol and numbers
// (docs/protocol.md) without a GPU, so that the road through jit, shard_map and XLA is testable.
//
// Operands: place int32[2] = (group number, rank); the partial latent, bfloat16 [T, L], or its K
// unweighted expert rows, bfloat16 [T, K, L], followed by weights float32 [T, K] and ids int32
// [T, K]; shared partial bfloat16 [T, H]; gain bfloat16 [L]; up-projection bfloat16, all rows
// [H, L] or the rank's own [H / R, L]. Result: bfloat16 [T, H], or [T, H / R] if scattered.
//
// Attribute `members`: the devices of all groups, rank after rank and group after group; or
// nothing, where the group number alone tells groups apart.

#include <chrono>
#include <cmath>
#include <cstring>
#include <vector>

#include "failure.h"
#include "ffi_error.h"
#include "tail_group.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace k3jax::tail {
namespace {

using Half = uint16_t;  // the bits of a bfloat16

float Widen(Half half) {
  uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// To nearest, ties to even; every NaN becomes 0x7fff, as on the device.
Half Round(float value) {
  if (std::isnan(value)) return 0x7fff;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<Half>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

const uint32_t* Words(const Half* halves) { return reinterpret_cast<const uint32_t*>(halves); }
uint32_t* Words(Half* halves) { return reinterpret_cast<uint32_t*>(halves); }

struct Inputs {
  int64_t tokens;
  const Half* latent;  // [T, L], or [T, K, L] with `weights` and `ids`
  const float* weights = nullptr;
  const int32_t* ids = nullptr;
  int64_t slots = 0;  // K
  const Half* shared;
  const Half* gain;
  const Half* up;  // the rank's own rows
  float eps;
};

class Tail {
 public:
  Tail(Call& call, const Inputs& inputs, bool two_shot, bool scattered)
      : call_(call),
        layout_(call.layout()),
        in_(inputs),
        two_shot_(two_shot),
        scattered_(scattered) {}

  void Run(Half* out) {
    for (int64_t token = 0; token < in_.tokens; ++token) Publish(token);
    call_.Rearm();
    std::vector<std::vector<Half>> normed(in_.tokens);
    for (int64_t token = 0; token < in_.tokens; ++token) {
      if (!two_shot_ || Owner(token) == call_.rank()) normed[token] = Reduce(token);
    }
    for (int64_t token = 0; token < in_.tokens; ++token) {
      if (two_shot_) {
        normed[token].resize(layout_.latent);
        call_.Receive(Owner(token), layout_.normed_at(call_.slot(), token),
                      Words(normed[token].data()), layout_.latent_row());
      }
      Project(token, normed[token], out);
    }
    if (!scattered_) Gather(out);
  }

 private:
  int64_t Owner(int64_t token) const { return token % layout_.ranks; }
  int64_t Columns() const { return layout_.hidden / layout_.ranks; }

  void Publish(int64_t token) {
    std::vector<Half> row = Partial(token);
    for (int64_t to = 0; to < layout_.ranks; ++to) {
      if (!two_shot_ || to == Owner(token)) {
        call_.Publish(to, layout_.latent_at(call_.slot(), call_.rank(), token), Words(row.data()),
                      layout_.latent_row());
      }
      call_.Publish(to, layout_.shared_at(call_.slot(), call_.rank(), token),
                    Words(in_.shared + token * layout_.hidden + to * Columns()),
                    layout_.column_row());
    }
  }

  std::vector<Half> Partial(int64_t token) const {
    int64_t width = layout_.latent;
    if (in_.slots == 0) {
      const Half* row = in_.latent + token * width;
      return std::vector<Half>(row, row + width);
    }
    std::vector<float> sum(width, 0.0f);
    for (int64_t k = token * in_.slots; k < (token + 1) * in_.slots; ++k) {
      if (in_.ids[k] < 0) continue;  // dropped: its row was never written
      const Half* row = in_.latent + k * width;
      for (int64_t i = 0; i < width; ++i) sum[i] = std::fma(in_.weights[k], Widen(row[i]), sum[i]);
    }
    return Rounded(sum);
  }

  // m, then n = r(m * rsqrt(mean(m^2) + eps) * gain), sent to all if there are two shots.
  std::vector<Half> Reduce(int64_t token) {
    std::vector<Half> row = SumOverRanks(
        [&](int64_t from) { return layout_.latent_at(call_.slot(), from, token); }, layout_.latent);
    float squares = 0.0f;
    for (Half half : row) squares += Widen(half) * Widen(half);
    float scale = 1.0f / std::sqrt(squares / layout_.latent + in_.eps);
    for (int64_t i = 0; i < layout_.latent; ++i) {
      row[i] = Round(Widen(row[i]) * scale * Widen(in_.gain[i]));
    }
    for (int64_t to = 0; two_shot_ && to < layout_.ranks; ++to) {
      call_.Publish(to, layout_.normed_at(call_.slot(), token), Words(row.data()),
                    layout_.latent_row());
    }
    return row;
  }

  void Project(int64_t token, const std::vector<Half>& normed, Half* out) {
    std::vector<Half> columns = SumOverRanks(
        [&](int64_t from) { return layout_.shared_at(call_.slot(), from, token); }, Columns());
    std::vector<float> wide(layout_.latent);
    for (int64_t i = 0; i < layout_.latent; ++i) wide[i] = Widen(normed[i]);
    for (int64_t c = 0; c < Columns(); ++c) {
      Half routed = Round(Dot(wide, in_.up + c * layout_.latent));
      columns[c] = Round(Widen(routed) + Widen(columns[c]));
    }
    if (scattered_) {
      uint32_t* row = Words(out + token * Columns());
      const uint32_t* words = Words(columns.data());
      for (int64_t i = 0; i < layout_.column_row(); ++i) row[i] = Canonical(words[i]);
      return;
    }
    for (int64_t to = 0; to < layout_.ranks; ++to) {
      call_.Publish(to, layout_.output_at(call_.slot(), token, call_.rank()), Words(columns.data()),
                    layout_.column_row());
    }
  }

  void Gather(Half* out) {
    for (int64_t token = 0; token < in_.tokens; ++token) {
      for (int64_t from = 0; from < layout_.ranks; ++from) {
        call_.Receive(from, layout_.output_at(call_.slot(), token, from),
                      Words(out + token * layout_.hidden + from * Columns()), layout_.column_row());
      }
    }
  }

  template <typename At>
  std::vector<Half> SumOverRanks(At at, int64_t width) {
    std::vector<float> sum(width, 0.0f);
    std::vector<Half> row(width);
    for (int64_t from = 0; from < layout_.ranks; ++from) {
      call_.Receive(from, at(from), Words(row.data()), width / 2);
      for (int64_t i = 0; i < width; ++i) sum[i] += Widen(row[i]);
    }
    return Rounded(sum);
  }

  static std::vector<Half> Rounded(const std::vector<float>& values) {
    std::vector<Half> halves(values.size());
    for (size_t i = 0; i < values.size(); ++i) halves[i] = Round(values[i]);
    return halves;
  }

  // Eight running sums, so that the compiler may use vector registers.
  static float Dot(const std::vector<float>& x, const Half* w) {
    float sums[8] = {};
    for (size_t i = 0; i < x.size(); ++i) sums[i % 8] += x[i] * Widen(w[i]);
    float total = 0.0f;
    for (float sum : sums) total += sum;
    return total;
  }

  Call& call_;
  const Layout& layout_;
  const Inputs& in_;
  const bool two_shot_;
  const bool scattered_;
};

void Want(bool fine, const char* what) {
  if (!fine) throw Failure(FailureKind::kInvalidArgument, Concat("k3jax_tail: ", what));
}

template <ffi::DataType dtype>
ffi::Buffer<dtype> Operand(ffi::RemainingArgs& operands, size_t index) {
  auto operand = operands.get<ffi::Buffer<dtype>>(index);
  Want(operand.has_value(), "an operand is missing or has another dtype");
  return *operand;
}

struct Shapes {
  int64_t ranks;
  int64_t max_tokens;
  bool two_shot;
  bool scattered;
};

constexpr char kShapes[] =
    "shapes do not fit: latent [T, L] or [T, K, L], shared [T, H], gain [L], up [H, L] or "
    "[H / ranks, L]";

// Reads and checks the operands; `rank` and `group` come from the first.
Inputs ReadInputs(ffi::RemainingArgs& operands, const Shapes& shapes, float eps, int64_t* group,
                  int64_t* rank, Layout* layout) {
  auto place = Operand<ffi::S32>(operands, 0);
  Want(place.element_count() == 2, "place must be int32[2]: group number and rank");
  *group = place.typed_data()[0];
  *rank = place.typed_data()[1];
  Want(0 <= *rank && *rank < shapes.ranks, "the rank lies outside the group");

  Inputs in;
  auto latent = Operand<ffi::BF16>(operands, 1);
  Want(latent.dimensions().size() == 2 || latent.dimensions().size() == 3, kShapes);
  size_t next = 2;
  if (latent.dimensions().size() == 3) {
    auto weights = Operand<ffi::F32>(operands, next++);
    auto ids = Operand<ffi::S32>(operands, next++);
    in.slots = latent.dimensions()[1];
    in.weights = weights.typed_data();
    in.ids = ids.typed_data();
    int64_t pairs = latent.dimensions()[0] * in.slots;
    Want(int64_t(weights.element_count()) == pairs && int64_t(ids.element_count()) == pairs,
         "weights and ids must have one entry for each expert row");
  }
  auto shared = Operand<ffi::BF16>(operands, next);
  auto gain = Operand<ffi::BF16>(operands, next + 1);
  auto up = Operand<ffi::BF16>(operands, next + 2);
  Want(shared.dimensions().size() == 2 && gain.dimensions().size() == 1 &&
           up.dimensions().size() == 2,
       kShapes);
  in.tokens = latent.dimensions()[0];
  in.latent = reinterpret_cast<const Half*>(latent.untyped_data());
  in.shared = reinterpret_cast<const Half*>(shared.untyped_data());
  in.gain = reinterpret_cast<const Half*>(gain.untyped_data());
  in.up = reinterpret_cast<const Half*>(up.untyped_data());
  in.eps = eps;

  *layout = {shapes.ranks, shapes.max_tokens, latent.dimensions().back(),
             shared.dimensions().back()};
  int64_t columns = layout->hidden / shapes.ranks;
  int64_t rows = up.dimensions().front();
  Want(1 < shapes.ranks && shapes.ranks <= kMaxRanks, "a group has 2 to 16 ranks");
  Want(layout->hidden % (2 * shapes.ranks) == 0 && layout->latent % 2 == 0,
       "latent and the columns of a rank must be even");
  Want(shared.dimensions().front() == in.tokens && gain.dimensions().front() == layout->latent &&
           up.dimensions().back() == layout->latent && (rows == layout->hidden || rows == columns),
       kShapes);
  Want(0 < in.tokens && in.tokens <= shapes.max_tokens, "tokens must be 1 .. max_tokens");
  if (rows == layout->hidden) in.up += *rank * columns * layout->latent;
  return in;
}

// What tells one group from all others of this process.
std::vector<int64_t> GroupMembers(ffi::Span<const int64_t> members, int64_t number, int64_t ranks) {
  if (members.size() == 0) return {number};
  Want(0 <= number && (number + 1) * ranks <= static_cast<int64_t>(members.size()),
       "the group's number lies outside its members");
  return {members.begin() + number * ranks, members.begin() + (number + 1) * ranks};
}

ffi::Error Execute(ffi::RunId run, ffi::RemainingArgs operands,
                   ffi::Result<ffi::BufferR2<ffi::BF16>> y, int64_t ranks, int64_t max_tokens,
                   float eps, bool two_shot, bool scattered, int64_t budget_ms,
                   ffi::Span<const int64_t> members) {
  try {
    Shapes shapes{ranks, max_tokens, two_shot, scattered};
    int64_t number, rank;
    Layout layout;
    Inputs in = ReadInputs(operands, shapes, eps, &number, &rank, &layout);
    int64_t width = scattered ? layout.hidden / ranks : layout.hidden;
    Want(y->dimensions()[0] == in.tokens && y->dimensions()[1] == width,
         "the result's shape is off");
    Group& group = Group::Get(GroupMembers(members, number, ranks), layout);
    Call call(group, rank, run.run_id, {in.tokens, two_shot, scattered},
              std::chrono::milliseconds(budget_ms));
    Tail(call, in, two_shot, scattered).Run(reinterpret_cast<Half*>(y->untyped_data()));
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ToError(error);
  }
}

}  // namespace
}  // namespace k3jax::tail

XLA_FFI_DEFINE_HANDLER_SYMBOL(k3jax_tail_execute, k3jax::tail::Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR2<ffi::BF16>>()
                                  .Attr<int64_t>("ranks")
                                  .Attr<int64_t>("max_tokens")
                                  .Attr<float>("eps")
                                  .Attr<bool>("two_shot")
                                  .Attr<bool>("scattered")
                                  .Attr<int64_t>("budget_ms")
                                  .Attr<ffi::Span<const int64_t>>("members"));

// Fills header words, then the first word of latent, shared, normed, output, and the end.
extern "C" void k3jax_tail_layout(int64_t ranks, int64_t max_tokens, int64_t latent, int64_t hidden,
                                  int64_t* words) {
  k3jax::tail::Layout layout{ranks, max_tokens, latent, hidden};
  words[0] = k3jax::tail::kHeaderWords;
  words[1] = layout.latent_begin();
  words[2] = layout.shared_begin();
  words[3] = layout.normed_begin();
  words[4] = layout.output_begin();
  words[5] = layout.end();
}

// For ctypes (k3jax/runtime/mailboxes.py); what Guard in failure.h says. The mailboxes of a group
// whose ranks live in several processes: `here` are those of this one, and the process that creates
// the shared memory does so before the others come. A second call replaces what the first made.
extern "C" const char* k3jax_tail_host_join(const char* name, int64_t create,
                                            const int64_t* members, const int64_t* here,
                                            int64_t num_here, int64_t ranks, int64_t max_tokens,
                                            int64_t latent, int64_t hidden) {
  using namespace k3jax::tail;
  return k3jax::Guard([&] {
    Layout layout{ranks, max_tokens, latent, hidden};
    size_t num_bytes = Group::NumBytes(layout);
    auto segment = create ? Segment::Create(name, num_bytes) : Segment::Open(name, num_bytes);
    Group::Add({members, members + ranks},
               std::make_unique<Group>(layout, std::move(segment),
                                       std::vector<int64_t>(here, here + num_here), create));
  });
}

extern "C" void k3jax_tail_unlink(const char* name) { k3jax::tail::Segment::Unlink(name); }
