// Where the ranks of several processes meet, on the host, before each execution.
//
// The host of one process may be a minute later than another's, as it compiles or reads a file. A
// kernel that waited for it would give up, and one of another program would exchange words that are
// not meant for it.

#ifndef K3JAX_FFI_TAIL_MEETING_H_
#define K3JAX_FFI_TAIL_MEETING_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tail_executions.h"
#include "tail_segment.h"
#include "workspace.h"

namespace k3jax::tail {

class Meeting {
 public:
  // `own` are the ranks of this process; the segment has NumBytes from `offset` on.
  Meeting(Segment& segment, size_t offset, Executions& executions, int64_t ranks,
          const std::vector<int64_t>& own);

  static size_t NumBytes();

  // Waits until every rank of another process has come to the execution. Fails it if one brings
  // another program.
  void Attend(int64_t rank, int64_t execution, const ProgramId& program, const Deadline& deadline);

 private:
  struct Arrival;

  Executions& executions_;
  Arrival* const arrivals_;  // one a rank
  std::vector<bool> elsewhere_;
};

}  // namespace k3jax::tail

#endif  // K3JAX_FFI_TAIL_MEETING_H_
