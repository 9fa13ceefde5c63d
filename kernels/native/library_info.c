#include "pekoe_native.h"

/* The digest of the sources that the build gives; a library that lies beside other sources is refused. */
#ifndef PEKOE_SOURCES
#define PEKOE_SOURCES ""
#endif

PEKOE_EXPORT const char *pekoe_sources(void) { return PEKOE_SOURCES; }
