// Processes that meet before an execution.

#include "../tail_meeting.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"

namespace k3jax::tail {
namespace {

using std::chrono::milliseconds;

const ProgramId kTail8{"tail_8", 8}, kTail5{"tail_5", 5};

// One process's view of a group of two ranks.
class Place {
 public:
  static size_t NumBytes() { return Executions::NumBytes() + Meeting::NumBytes(); }

  Place(std::unique_ptr<Segment> segment, int64_t rank, bool created)
      : segment_(std::move(segment)),
        executions_(*segment_, 2, created),
        meeting_(*segment_, Executions::NumBytes(), executions_, 2, {rank}),
        rank_(rank) {
    segment_->Claim({rank});
  }

  void Attend(int64_t run, const ProgramId& program, milliseconds patience = milliseconds(20000)) {
    const int64_t execution = executions_.NumberOf(run).first;
    executions_.ThrowIfFailed(execution);
    meeting_.Attend(rank_, execution, program, Deadline(patience));
  }

  Executions& executions() { return executions_; }

 private:
  std::unique_ptr<Segment> segment_;
  Executions executions_;
  Meeting meeting_;
  const int64_t rank_;
};

// Rank 0 here; rank 1 in a child, which does `in_child(place)`.
class TwoProcesses {
 public:
  template <typename Body>
  explicit TwoProcesses(Body in_child) {
    const std::string name = "/k3jax-meeting-" + std::to_string(getpid());
    here = std::make_unique<Place>(Segment::Create(name, Place::NumBytes()), 0, true);
    child_ = fork();
    if (child_ == 0) {
      Place there(Segment::Open(name, Place::NumBytes()), 1, false);
      kill(getpid(), SIGSTOP);  // until the parent knows that the rank is claimed
      in_child(there);
      _exit(testing::failed_checks == 0 ? 0 : 1);
    }
    int status;
    waitpid(child_, &status, WUNTRACED);
    Segment::Unlink(name);
    kill(child_, SIGCONT);
  }

  bool EndedWell() {
    int status;
    waitpid(child_, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

  std::unique_ptr<Place> here;

 private:
  pid_t child_;
};

TEST(TheFasterOneWaits) {
  auto run_all = [](Place& place) {
    for (int run = 1; run < 500; ++run) place.Attend(run, run % 3 ? kTail8 : kTail5);
  };
  TwoProcesses two([&](Place& there) {
    std::this_thread::sleep_for(milliseconds(1000));
    there.Attend(0, kTail5);
    run_all(there);
  });
  auto begin = std::chrono::steady_clock::now();
  two.here->Attend(0, kTail5);
  CHECK(std::chrono::steady_clock::now() - begin > milliseconds(100));
  run_all(*two.here);
  CHECK(two.EndedWell());
}

TEST(AnotherProgramIsNamedOnBoth) {
  TwoProcesses two(
      [](Place& there) { CHECK_THROWS(there.Attend(0, kTail5), "has 'tail_5'", "has 'tail_8'"); });
  CHECK_THROWS(two.here->Attend(0, kTail8), "has 'tail_8'", "has 'tail_5'", "same shapes");
  CHECK(two.EndedWell());
}

TEST(WhoDoesNotComeIsNamedAndIsRefusedWhenItComes) {
  TwoProcesses two([](Place& there) {
    std::this_thread::sleep_for(milliseconds(1500));
    CHECK_THROWS(there.Attend(0, kTail8), "rank 0 waits for rank 1", "50 ms");
    there.Attend(1, kTail8);
  });
  CHECK_THROWS(two.here->Attend(0, kTail8, milliseconds(50)), "rank 0 waits for rank 1", "50 ms");
  two.here->Attend(1, kTail8);
  CHECK(two.EndedWell());
}

TEST(WhoeverWaitsHearsThatTheOtherHasFailed) {
  TwoProcesses two([](Place& there) {
    const int64_t execution = there.executions().NumberOf(0).first;
    CHECK_THROWS(there.executions().Fail(execution, FailureKind::kInternal, "a card is on fire"),
                 "a card is on fire");
  });
  CHECK_THROWS(two.here->Attend(0, kTail8), "a card is on fire");
  CHECK(two.EndedWell());
}

TEST(AnEndedProcessIsNamedAtOnce) {
  TwoProcesses two([](Place&) { kill(getpid(), SIGKILL); });
  CHECK_THROWS(two.here->Attend(0, kTail8), "the process of rank 1 has ended");
  CHECK(!two.EndedWell());
}

}  // namespace
}  // namespace k3jax::tail

int main() { return k3jax::testing::RunTests(); }
