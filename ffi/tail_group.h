// The ranks of one tensor-parallel group inside one process: their workspaces on the host, who is
// inside a call, and what happens after a failure. docs/protocol.md is the specification.

#ifndef K3JAX_FFI_TAIL_GROUP_H_
#define K3JAX_FFI_TAIL_GROUP_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "tail_layout.h"

namespace k3jax::tail {

enum class ErrorKind { kInvalidArgument, kFailedPrecondition, kDeadlineExceeded };

// Ends the failing execution on every rank of the group.
class TailError : public std::runtime_error {
 public:
  TailError(ErrorKind kind, const std::string& message)
      : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// What all ranks must agree on before anybody polls for data.
struct CallFacts {
  int64_t run;  // the execution's number, the same on all its ranks
  int64_t tokens;
  bool two_shot;
  bool scattered;

  uint64_t Pack() const;
  static CallFacts Unpack(uint64_t word);
  std::string Describe() const;
};

class Group {
 public:
  explicit Group(const Layout& layout);

  // The group of this number with this layout, made on first use and kept.
  static Group& Get(int64_t number, const Layout& layout);

  const Layout& layout() const { return layout_; }

 private:
  friend class Call;
  using Deadline = std::chrono::steady_clock::time_point;

  void Enter(int64_t rank, int64_t run, Deadline deadline);
  void Leave(int64_t rank);
  [[noreturn]] void Fail(int64_t run, const TailError& error);
  void Arm();
  uint64_t& facts_at(int64_t reader, int64_t slot, int64_t from) {
    return facts_[(reader * kSlots + slot) * layout_.ranks + from];
  }

  const Layout layout_;
  std::vector<std::vector<uint32_t>> workspaces_;  // one a rank
  std::vector<uint64_t> facts_;                    // [reader, slot, from]; 0 is armed

  std::mutex mutex_;
  std::condition_variable left_;
  std::vector<int64_t> inside_;     // the execution that is inside on each rank, 0 for none
  std::set<int64_t> failed_runs_;
  std::atomic<bool> broken_{false};  // a failure that has not been reset yet
  ErrorKind first_kind_ = ErrorKind::kInvalidArgument;
  std::string first_error_;
};

// One rank's passage through one call: owns the epoch, the polling budget and all mailbox access.
class Call {
 public:
  // Enters, moves the epoch on and agrees with the other ranks.
  Call(Group& group, int64_t rank, const CallFacts& facts, std::chrono::milliseconds budget);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  int64_t rank() const { return rank_; }
  int64_t slot() const { return slot_; }
  const Layout& layout() const { return group_.layout_; }

  // Stores words into a rank's mailbox, -0 made +0.
  void Publish(int64_t to, int64_t at, const uint32_t* words, int64_t count);

  // Arms what the previous call used. After publishing: nobody waits for it.
  void Rearm();

  // Waits for words in the own mailbox that rank `from` stores.
  void Receive(int64_t from, int64_t at, uint32_t* words, int64_t count);

 private:
  template <typename Word>
  Word Poll(const Word& word, Word armed, int64_t from);
  void Agree(const CallFacts& facts);

  Group& group_;
  const int64_t rank_;
  const int64_t run_;
  const std::chrono::milliseconds budget_;
  const Group::Deadline deadline_;
  uint32_t epoch_ = 0;
  uint32_t previous_ = 0;  // the header's word about the call before
  int64_t slot_ = 0;
};

}  // namespace k3jax::tail

#endif  // K3JAX_FFI_TAIL_GROUP_H_
