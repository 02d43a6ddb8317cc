#include "tail_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "failure.h"

namespace k3jax::tail {
namespace {

void Check(bool fine, const std::string& what, int error) {
  if (fine) return;
  throw Failure(FailureKind::kFailedPrecondition, Concat(what, ": ", std::strerror(error)));
}

// A record lock on the byte of a rank: the kernel drops it when its process ends, even if killed.
struct flock Lock(int64_t rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

Segment::Segment(int file, size_t num_bytes) : file_(file), num_bytes_(num_bytes) {
  int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, flags, file, 0);
  if (data == MAP_FAILED) {
    int error = errno;
    if (file >= 0) close(file);
    Check(false, Concat("mapping ", num_bytes, " bytes of mailboxes"), error);
  }
  data_ = static_cast<char*>(data);
}

Segment::~Segment() {
  munmap(data_, num_bytes_);
  if (file_ >= 0) close(file_);
}

std::unique_ptr<Segment> Segment::Private(size_t num_bytes) {
  return std::unique_ptr<Segment>(new Segment(-1, num_bytes));
}

std::unique_ptr<Segment> Segment::Create(const std::string& name, size_t num_bytes) {
  int file = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  Check(file >= 0, Concat("creating shared memory ", name), errno);
  // Reserves the pages: writing to a page that the file system has no room for ends the process.
  if (int error = posix_fallocate(file, 0, num_bytes)) {
    close(file);
    shm_unlink(name.c_str());
    Check(false,
          Concat("reserving ", num_bytes, " bytes of shared memory (raise the size of /dev/shm)"),
          error);
  }
  return std::unique_ptr<Segment>(new Segment(file, num_bytes));
}

std::unique_ptr<Segment> Segment::Open(const std::string& name, size_t num_bytes) {
  int file = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
  Check(file >= 0, Concat("opening shared memory ", name, " of another process on this machine"),
        errno);
  struct stat facts = {};
  const bool known = fstat(file, &facts) == 0;
  if (!known || facts.st_size != static_cast<off_t>(num_bytes)) {
    close(file);
    throw Failure(FailureKind::kFailedPrecondition,
                  Concat("shared memory ", name, " of another process has ", facts.st_size,
                         " bytes, wanted ", num_bytes,
                         ": run the same release of k3jax in all processes"));
  }
  return std::unique_ptr<Segment>(new Segment(file, num_bytes));
}

void Segment::Unlink(const std::string& name) { shm_unlink(name.c_str()); }

void Segment::Claim(const std::vector<int64_t>& ranks) {
  own_ranks_ = ranks;
  for (int64_t rank : ranks) {
    struct flock lock = Lock(rank);
    int result = file_ < 0 ? 0 : fcntl(file_, F_SETLK, &lock);
    Check(result == 0, Concat("claiming rank ", rank, ", which another process has"), errno);
  }
}

bool Segment::Abandoned(int64_t rank) const {
  if (file_ < 0) return false;
  if (std::count(own_ranks_.begin(), own_ranks_.end(), rank) > 0) return false;
  struct flock lock = Lock(rank);
  return fcntl(file_, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

}  // namespace k3jax::tail
