#include "tail_executions.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "tail_layout.h"

namespace k3jax::tail {
namespace {

constexpr size_t kRememberedRuns = 1024;

void InitializeMutex(pthread_mutex_t* mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

// A process may be killed while it holds the lock; what it guards is then as good as before.
class RobustLock {
 public:
  explicit RobustLock(pthread_mutex_t* mutex) : mutex_(mutex) {
    if (pthread_mutex_lock(mutex_) == EOWNERDEAD) pthread_mutex_consistent(mutex_);
  }
  ~RobustLock() { pthread_mutex_unlock(mutex_); }
  RobustLock(const RobustLock&) = delete;
  RobustLock& operator=(const RobustLock&) = delete;

 private:
  pthread_mutex_t* const mutex_;
};

}  // namespace

struct Executions::Control {
  struct Progress {
    int64_t reached;  // the last execution in which the rank was ready to arm
    int64_t armed;    // the last one in which it has armed
  };

  pthread_mutex_t mutex;  // guards writing of the next three
  int64_t failed;         // the last execution that failed, 0 for none
  FailureKind kind;
  char message[1024];
  Progress ranks[kMaxRanks];
};

Executions::Executions(Segment& segment, int64_t ranks, bool created)
    : segment_(segment), ranks_(ranks), control_(reinterpret_cast<Control*>(segment.data())) {
  if (ranks < 1 || ranks > kMaxRanks) {
    throw Failure(FailureKind::kInvalidArgument,
                  Concat("a group of the fused tail has 1 to ", kMaxRanks, " ranks, got ", ranks));
  }
  if (created) InitializeMutex(&control_->mutex);
}

size_t Executions::NumBytes() { return (sizeof(Control) + 63) / 64 * 64; }

std::pair<int64_t, bool> Executions::NumberOf(int64_t run) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = std::find(runs_.rbegin(), runs_.rend(), run);
  if (found != runs_.rend()) return {count_ - (found - runs_.rbegin()), false};
  runs_.push_back(run);
  if (runs_.size() > kRememberedRuns) runs_.pop_front();
  return {++count_, true};
}

void Executions::Fail(int64_t execution, FailureKind kind, const std::string& message) {
  {
    RobustLock lock(&control_->mutex);
    if (control_->failed < execution) {
      control_->kind = kind;
      control_->message[message.copy(control_->message, sizeof(control_->message) - 1)] = 0;
      Store(control_->failed, execution);
    }
  }
  ThrowFailure();
}

int64_t Executions::failed() const { return Load(control_->failed); }

void Executions::ThrowIfFailed(int64_t execution) {
  if (execution <= failed()) ThrowFailure();
}

bool Executions::MustRecover(int64_t rank) const {
  return failed() != 0 && failed() >= control_->ranks[rank].armed;
}

void Executions::FailAgain(int64_t execution) {
  {
    RobustLock lock(&control_->mutex);
    Store(control_->failed, std::max(control_->failed, execution));
  }
  ThrowFailure();
}

void Executions::ThrowFailure() {
  RobustLock lock(&control_->mutex);
  throw Failure(control_->kind, control_->message);
}

void Executions::Recover(int64_t rank, int64_t execution, const Deadline& deadline,
                         const std::function<void()>& arm) {
  if (!MustRecover(rank)) return;
  Control::Progress& own = control_->ranks[rank];
  auto await_all = [&](int64_t Control::Progress::*step) {
    Store(own.*step, execution);
    for (int64_t other = 0; other < ranks_; ++other) {
      const int64_t& theirs = control_->ranks[other].*step;
      Await(rank, execution, other, deadline, [&] { return Load(theirs) >= execution; });
      if (Load(theirs) == execution) continue;
      Fail(execution, FailureKind::kFailedPrecondition,
           Concat("rank ", rank, " is in execution ", execution, " of the fused tail, rank ", other,
                  " in ", Load(theirs), ": it catches up in the next"));
    }
  };
  await_all(&Control::Progress::reached);  // nobody may still publish when a mailbox is armed
  arm();
  await_all(&Control::Progress::armed);  // and all must be armed when somebody publishes
}

void Executions::GiveUp(int64_t rank, int64_t execution, int64_t other, const Deadline& deadline,
                        bool ended) {
  if (ended) {
    Fail(execution, FailureKind::kUnavailable,
         Concat("rank ", rank, " waits in the fused tail, but the process of rank ", other,
                " has ended; start all processes of the group again"));
  }
  Fail(execution, FailureKind::kDeadlineExceeded,
       Concat("rank ", rank, " waits for rank ", other, " in the fused tail and gave up after ",
              deadline.patience.count(), " ms; rank ", other, " did not make this call"));
}

}  // namespace k3jax::tail
