// A pretended libcuda.so.1 that launches nothing and remembers what it was told to launch, byte by byte.
//
// Built with -DNOTHING(...) lines for the other functions that Triton's modules name (see tests/programs).
#include <string.h>

enum { MOST = 64 };

struct Launch {
  unsigned grid[3], block[3], shared_bytes, attributes;
  void *function, *stream;
  unsigned char parameters[MOST][8];
  int launches;
} last;

struct Config {  // CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  void *stream, *attributes;
  unsigned attribute_count;
};

static unsigned widths[MOST];
static int count;

// How many parameters the next kernel has, and the bytes of each.
void expect(int parameters, const unsigned *bytes) {
  count = parameters;
  memcpy(widths, bytes, sizeof *bytes * parameters);
  memset(&last, 0, sizeof last);
}

const struct Launch *seen(void) { return &last; }

int cuLaunchKernelEx(const struct Config *config, void *function, void **parameters, void **extra) {
  (void)extra;
  memcpy(last.grid, config->grid, sizeof last.grid);
  memcpy(last.block, config->block, sizeof last.block);
  last.shared_bytes = config->shared_bytes;
  last.attributes = config->attribute_count;
  last.stream = config->stream;
  last.function = function;
  for (int at = 0; at < count; ++at) memcpy(last.parameters[at], parameters[at], widths[at]);
  ++last.launches;
  return 0;
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **parameters,
                   void **extra) {
  const struct Config config = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream, 0, 0};
  return cuLaunchKernelEx(&config, function, parameters, extra);
}

int cuCtxGetCurrent(void **context) {
  *context = &last;
  return 0;
}

int cuGetErrorString(int error, const char **text) {
  (void)error;
  *text = "a pretended failure";
  return 0;
}

#define NOTHING(name) \
  int name(void) { return 0; }
#include "others.h"
