// What the handlers return to XLA for an exception.

#ifndef K3JAX_FFI_FFI_ERROR_H_
#define K3JAX_FFI_FFI_ERROR_H_

#include <exception>

#include "failure.h"
#include "xla/ffi/api/ffi.h"

namespace k3jax {

inline xla::ffi::Error ToError(const std::exception& error) {
  using xla::ffi::ErrorCode;
  const auto* failure = dynamic_cast<const Failure*>(&error);
  ErrorCode code = ErrorCode::kInternal;
  switch (failure ? failure->kind() : FailureKind::kInternal) {
    case FailureKind::kInvalidArgument:
      code = ErrorCode::kInvalidArgument;
      break;
    case FailureKind::kFailedPrecondition:
      code = ErrorCode::kFailedPrecondition;
      break;
    case FailureKind::kDeadlineExceeded:
      code = ErrorCode::kDeadlineExceeded;
      break;
    case FailureKind::kUnavailable:
      code = ErrorCode::kUnavailable;
      break;
    case FailureKind::kResourceExhausted:
      code = ErrorCode::kResourceExhausted;
      break;
    case FailureKind::kInternal:
      break;
  }
  return xla::ffi::Error(code, Concat("k3jax: ", error.what()));
}

}  // namespace k3jax

#endif  // K3JAX_FFI_FFI_ERROR_H_
