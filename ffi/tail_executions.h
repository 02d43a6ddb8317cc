// The executions of one group of ranks: which one failed, and how the ranks start afresh after it.
// docs/protocol.md, "A failed or cancelled step".

#ifndef K3JAX_FFI_TAIL_EXECUTIONS_H_
#define K3JAX_FFI_TAIL_EXECUTIONS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "failure.h"
#include "tail_segment.h"

namespace k3jax::tail {

// Until when somebody waits, and for how long that is.
struct Deadline {
  explicit Deadline(std::chrono::milliseconds patience)
      : patience(patience), end(std::chrono::steady_clock::now() + patience) {}
  std::chrono::milliseconds patience;
  std::chrono::steady_clock::time_point end;
};

// Executions are numbered from 1 by each process. All processes of a group run the same program, so
// they count alike; one that has missed some is refused until it has caught up with the others.
class Executions {
 public:
  // Kept at the start of the segment, which whoever creates it prepares before others open it.
  Executions(Segment& segment, int64_t ranks, bool created);

  static size_t NumBytes();

  // The number of XLA's run, which is the same on all ranks of a process, and whether it is new.
  std::pair<int64_t, bool> NumberOf(int64_t run);

  // Ends this execution and all before it, on all ranks; throws the Failure that did so first.
  [[noreturn]] void Fail(int64_t execution, FailureKind kind, const std::string& message);
  void ThrowIfFailed(int64_t execution);

  // The last one that failed, 0 for none.
  int64_t failed() const;

  // Whether an execution has failed since the rank has armed its mailboxes last.
  bool MustRecover(int64_t rank) const;

  // Where it must, fails this execution too, as the last one did, so that somebody hears of it.
  [[noreturn]] void FailAgain(int64_t execution);

  // After a failure: waits until all ranks are in this execution, so in none before it, calls `arm`
  // for the own mailboxes, and waits until all have done so. Else returns at once.
  void Recover(int64_t rank, int64_t execution, const Deadline& deadline,
               const std::function<void()>& arm);

  // Waits in an execution until something that another rank does has come about. Fails the
  // execution if the deadline passes or the process of that rank has ended.
  template <typename Condition>
  void Await(int64_t rank, int64_t execution, int64_t other, const Deadline& deadline,
             Condition condition) {
    for (int64_t polls = 1; !condition(); ++polls) {
      if (polls < kEagerPolls) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      if (polls % 64 != 0) continue;
      ThrowIfFailed(execution);
      const bool ended = segment_.Abandoned(other);
      const bool late = std::chrono::steady_clock::now() > deadline.end;
      // Looked at once more: what the other rank did before it ended counts, and so does what it did
      // in time while this thread slept past its deadline.
      if ((ended || late) && !condition()) GiveUp(rank, execution, other, deadline, ended);
    }
  }

 private:
  struct Control;

  static constexpr int64_t kEagerPolls = 1 << 14;  // some milliseconds

  [[noreturn]] void GiveUp(int64_t rank, int64_t execution, int64_t other, const Deadline& deadline,
                           bool ended);
  [[noreturn]] void ThrowFailure();

  Segment& segment_;
  const int64_t ranks_;
  Control* const control_;
  std::mutex mutex_;          // guards the rest
  std::deque<int64_t> runs_;  // the last ones, the newest last
  int64_t count_ = 0;
};

// Memory that other threads and processes change is accessed by these alone. On x86 they are plain
// loads and stores; elsewhere they keep re-arming before the publication that a peer answers.
template <typename Word>
Word Load(const Word& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

template <typename Word>
void Store(Word& word, Word value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

}  // namespace k3jax::tail

#endif  // K3JAX_FFI_TAIL_EXECUTIONS_H_
