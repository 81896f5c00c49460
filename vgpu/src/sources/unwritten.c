// What the stub of a call does that nobody wrote.
#include "sources/sources.h"
#include "sources/stubs.h"
#include "state/calls.h"
#include "state/names.h"
#include "state/state.h"
#include "streams/stream.h"

int call_stub(int index, void* first_argument) {
  if (!state_init()) return call_error(call_name[index]);
  if (index < MAX_CALLS) call_count(&self->calls[index]);
  switch (call_class[index]) {
    case CALL_COMPUTES:
      return stream_run(cublas_stream(first_argument),
                        &(Operation){.kind = NODE_KERNEL})
                 ? 13  // CUBLAS_STATUS_EXECUTION_FAILED
                 : 0;
    case CALL_IGNORED:
      return config.strict ? call_error(call_name[index]) : 0;
    default:
      return call_error(call_name[index]);
  }
}
