// The ranks of one tensor-parallel group on the host: their workspaces, and their passage through a
// call. docs/protocol.md is the specification.

#ifndef K3JAX_FFI_TAIL_GROUP_H_
#define K3JAX_FFI_TAIL_GROUP_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tail_executions.h"
#include "tail_layout.h"
#include "tail_segment.h"

namespace k3jax::tail {

// What all ranks must agree on before anybody polls for data.
struct CallFacts {
  int64_t tokens;
  bool two_shot;
  bool scattered;
  int64_t execution = 0;  // which one of the group's it is; `Call` counts

  uint64_t Pack() const;
  static CallFacts Unpack(uint64_t word);
  std::string Describe() const;
};

class Group {
 public:
  // All ranks in this process.
  explicit Group(const Layout& layout);

  // These ranks in this process, the others wherever the segment of NumBytes is shared. Who creates
  // the segment prepares it, before anybody else has its name.
  Group(const Layout& layout, std::unique_ptr<Segment> segment, const std::vector<int64_t>& ranks,
        bool created);

  static size_t NumBytes(const Layout& layout);

  // The group of these members (any numbers that tell it from others) with this layout. One that
  // nobody has added has all its ranks here, and is made on first use.
  static Group& Get(const std::vector<int64_t>& members, const Layout& layout);
  static void Add(const std::vector<int64_t>& members, std::unique_ptr<Group> group);

  const Layout& layout() const { return layout_; }

 private:
  friend class Call;

  uint32_t* workspace(int64_t rank) const { return workspaces_ + rank * layout_.end(); }
  uint64_t& facts_at(int64_t reader, int64_t slot, int64_t from) const {
    return facts_[(reader * kSlots + slot) * layout_.ranks + from];
  }

  // Admits a rank and returns the number of its execution.
  int64_t Enter(int64_t rank, int64_t run);
  void Leave(int64_t rank);
  void Arm(int64_t rank);

  const Layout layout_;
  const std::unique_ptr<Segment> segment_;
  Executions executions_;
  uint64_t* const facts_;       // [reader, slot, from]; 0 is armed
  uint32_t* const workspaces_;  // one a rank

  std::mutex mutex_;
  std::vector<int64_t> inside_;  // the execution that is inside on each rank here, 0 for none
};

// One rank's passage through one call: owns the epoch, the polling budget and all mailbox access.
class Call {
 public:
  // Enters, recovers with the others if an execution has failed, moves the epoch on and agrees with
  // the other ranks. `run` is XLA's number of the execution, the same on all ranks of a process.
  Call(Group& group, int64_t rank, int64_t run, const CallFacts& facts,
       std::chrono::milliseconds budget);
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
  void Agree(CallFacts facts);

  template <typename Condition>
  void Await(int64_t from, Condition condition) {
    group_.executions_.Await(rank_, execution_, from, deadline_, condition);
  }

  Group& group_;
  const int64_t rank_;
  const Deadline deadline_;
  int64_t execution_ = 0;
  uint32_t epoch_ = 0;
  uint32_t previous_ = 0;  // the header's word about the call before
  int64_t slot_ = 0;
};

}  // namespace k3jax::tail

#endif  // K3JAX_FFI_TAIL_GROUP_H_
