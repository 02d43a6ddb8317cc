// Processes that meet before a program's first run.

#include "../tail_meeting.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>

#include "check.h"

namespace k3jax::tail {
namespace {

using std::chrono::milliseconds;

const ProgramId kTail8{"tail_8", 8}, kTail5{"tail_5", 5};

// Rank 0 of two here; rank 1 in a child, which does `in_child(meeting)`.
template <typename Body>
pid_t Fork(std::unique_ptr<Meeting>& meeting, Body in_child) {
  const std::string name = "/k3jax-meeting-" + std::to_string(getpid());
  meeting = std::make_unique<Meeting>(Segment::Create(name, Meeting::NumBytes()), 2,
                                      std::vector<int64_t>{0});
  pid_t child = fork();
  if (child == 0) {
    Meeting other(Segment::Open(name, Meeting::NumBytes()), 2, {1});
    kill(getpid(), SIGSTOP);
    in_child(other);
    _exit(testing::failed_checks == 0 ? 0 : 1);
  }
  int status;
  waitpid(child, &status, WUNTRACED);
  Segment::Unlink(name);
  kill(child, SIGCONT);
  return child;
}

void CheckEnded(pid_t child) {
  int status;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(TheFasterOneWaits) {
  std::unique_ptr<Meeting> meeting;
  pid_t child = Fork(meeting, [](Meeting& other) {
    std::this_thread::sleep_for(milliseconds(1000));
    for (int i = 0; i < 500; ++i) other.Attend(1, i % 3 ? kTail8 : kTail5, milliseconds(20000));
  });
  auto begin = std::chrono::steady_clock::now();
  meeting->Attend(0, kTail5, milliseconds(20000));
  CHECK(std::chrono::steady_clock::now() - begin > milliseconds(100));
  for (int i = 1; i < 500; ++i) meeting->Attend(0, i % 3 ? kTail8 : kTail5, milliseconds(20000));
  CheckEnded(child);
}

TEST(AnotherProgramIsNamedOnBoth) {
  std::unique_ptr<Meeting> meeting;
  pid_t child = Fork(meeting, [](Meeting& other) {
    CHECK_THROWS(other.Attend(1, kTail5, milliseconds(20000)), "rank 1 has 'tail_5'",
                 "rank 0 has 'tail_8'");
  });
  CHECK_THROWS(meeting->Attend(0, kTail8, milliseconds(20000)), "rank 0 has 'tail_8'",
               "rank 1 has 'tail_5'", "same shapes");
  CheckEnded(child);
}

TEST(WhoDoesNotComeIsNamedAndTheNextAttemptCounts) {
  std::unique_ptr<Meeting> meeting;
  pid_t child = Fork(meeting, [](Meeting& other) {
    std::this_thread::sleep_for(milliseconds(1500));
    other.Attend(1, kTail8, milliseconds(20000));
  });
  CHECK_THROWS(meeting->Attend(0, kTail8, milliseconds(50)), "may not run 'tail_8'",
               "rank 1 did not come", "50 ms");
  meeting->Attend(0, kTail8, milliseconds(20000));
  CheckEnded(child);
}

TEST(AnEndedProcessIsNamedAtOnce) {
  std::unique_ptr<Meeting> meeting;
  pid_t child = Fork(meeting, [](Meeting&) { kill(getpid(), SIGKILL); });
  CHECK_THROWS(meeting->Attend(0, kTail8, milliseconds(20000)), "the process of rank 1 has ended");
  int status;
  waitpid(child, &status, 0);
  CHECK(WIFSIGNALED(status));
}

}  // namespace
}  // namespace k3jax::tail

int main() { return k3jax::testing::RunTests(); }
