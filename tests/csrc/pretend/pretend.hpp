// A pretended GPU: device memory is host memory, and time passes only when a product runs.
#pragma once

struct Pretend {
  double clock = 0.0;         // milliseconds
  bool capturing = false;     // what cudaStreamIsCapturing says
  bool out_of_memory = false; // what cudaMalloc says
  int allocated = 0;          // blocks not yet freed
  int products = 0;           // products run so far
  int last_algorithm = -1;
  int sets = 0;               // attributes of products that were set
  int queries = 0;            // times the library was asked for suggestions
};

extern Pretend pretend;
