// One rank's workspace of the fused tail, as docs/protocol.md draws it.
//
// k3jax/runtime/workspace.py computes the same offsets; a test compares them through
// k3jax_tail_layout.

#ifndef K3JAX_FFI_TAIL_LAYOUT_H_
#define K3JAX_FFI_TAIL_LAYOUT_H_

#include <cstdint>
#include <tuple>

namespace k3jax::tail {

constexpr uint32_t kMagic = 0x4d33424b;  // "KB3M"
constexpr uint32_t kLayoutVersion = 1;
constexpr uint32_t kArmed = 0x80000000;  // the bfloat16 pair (+0, -0), never published
constexpr int kSlots = 3;
constexpr int kMaxRanks = 16;

// Header, in 32-bit words.
enum HeaderWord : int {
  kMagicWord = 0,
  kVersionWord = 1,
  kRanksWord = 2,
  kRankWord = 3,
  kMaxTokensWord = 4,
  kLatentWord = 5,
  kHiddenWord = 6,
  kEpochWord = 8,
  kArrivalsWord = 9,
  kPreviousWord = 10,  // 2 * tokens of the call before, + 1 if it went in two shots
  kFailedWord = 11,    // epoch + 1 of the call that failed, 0 for none
  kNoteWord = 14,      // the 64-bit address of the word for the rank that it waited for
  kPeersWord = 16,     // kMaxRanks 64-bit addresses
  kHeaderWords = 64,
};

// Offsets are in 32-bit words from the start of the workspace.
struct Layout {
  int64_t ranks;
  int64_t max_tokens;
  int64_t latent;
  int64_t hidden;

  int64_t latent_row() const { return latent / 2; }
  int64_t column_row() const { return hidden / ranks / 2; }  // a rank's share of an output row
  int64_t output_row() const { return hidden / 2; }

  int64_t latent_words() const { return kSlots * ranks * max_tokens * latent_row(); }
  int64_t shared_words() const { return kSlots * ranks * max_tokens * column_row(); }
  int64_t normed_words() const { return kSlots * max_tokens * latent_row(); }
  int64_t output_words() const { return kSlots * max_tokens * output_row(); }

  int64_t latent_begin() const { return kHeaderWords; }
  int64_t shared_begin() const { return latent_begin() + latent_words(); }
  int64_t normed_begin() const { return shared_begin() + shared_words(); }
  int64_t output_begin() const { return normed_begin() + normed_words(); }
  int64_t end() const { return output_begin() + output_words(); }

  int64_t latent_at(int64_t slot, int64_t from, int64_t token) const {
    return latent_begin() + ((slot * ranks + from) * max_tokens + token) * latent_row();
  }
  int64_t shared_at(int64_t slot, int64_t from, int64_t token) const {
    return shared_begin() + ((slot * ranks + from) * max_tokens + token) * column_row();
  }
  int64_t normed_at(int64_t slot, int64_t token) const {
    return normed_begin() + (slot * max_tokens + token) * latent_row();
  }
  int64_t output_at(int64_t slot, int64_t token, int64_t owner) const {
    return output_begin() + (slot * max_tokens + token) * output_row() + owner * column_row();
  }

  bool operator<(const Layout& other) const {
    return std::tie(ranks, max_tokens, latent, hidden) <
           std::tie(other.ranks, other.max_tokens, other.latent, other.hidden);
  }
};

// What a publisher stores instead of a word: both halves of -0 become +0, all else stays.
inline uint32_t Canonical(uint32_t word) {
  if ((word & 0xffffu) == 0x8000u) word &= 0xffff0000u;
  if ((word & 0xffff0000u) == 0x80000000u) word &= 0xffffu;
  return word;
}

}  // namespace k3jax::tail

#endif  // K3JAX_FFI_TAIL_LAYOUT_H_
