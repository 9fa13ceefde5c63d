#include "pekoe_native.h"

/* Grows with every change of a signature: a library of another build is refused. */
PEKOE_EXPORT int32_t pekoe_abi(void) { return 1; }
