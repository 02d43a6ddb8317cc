#include "tail_meeting.h"

#include "failure.h"
#include "tail_layout.h"

namespace k3jax::tail {

// What one rank tells the others. Who is in one execution may see another rank in the next, but not
// further, so two programs are kept.
struct Meeting::Arrival {
  struct Program {
    int64_t execution;
    uint64_t digest;
    char name[48];
  };

  int64_t execution;
  Program programs[2];
};

Meeting::Meeting(Segment& segment, size_t offset, Executions& executions, int64_t ranks,
                 const std::vector<int64_t>& own)
    : executions_(executions),
      arrivals_(reinterpret_cast<Arrival*>(segment.data() + offset)),
      elsewhere_(ranks, true) {
  for (int64_t rank : own) elsewhere_[rank] = false;
}

size_t Meeting::NumBytes() { return kMaxRanks * sizeof(Arrival); }

void Meeting::Attend(int64_t rank, int64_t execution, const ProgramId& program,
                     const Deadline& deadline) {
  Arrival::Program& brought = arrivals_[rank].programs[execution % 2];
  brought.execution = execution;
  brought.digest = program.digest;
  brought.name[program.name.copy(brought.name, sizeof(brought.name) - 1)] = 0;
  Store(arrivals_[rank].execution, execution);
  for (size_t other = 0; other < elsewhere_.size(); ++other) {
    if (!elsewhere_[other]) continue;
    const Arrival& theirs = arrivals_[other];
    executions_.Await(rank, execution, other, deadline,
                      [&] { return Load(theirs.execution) >= execution; });
    const Arrival::Program& met = theirs.programs[execution % 2];
    if (met.execution == execution && met.digest == program.digest) continue;
    executions_.Fail(
        execution, FailureKind::kInvalidArgument,
        Concat("ranks of the fused tail bring different programs to execution ", execution,
               ": rank ", rank, " has '", program.name, "', rank ", other, " has '", met.name,
               "'. All processes must run the same program, on arrays of the same "
               "shapes"));
  }
}

}  // namespace k3jax::tail
