// Reads a safetensors file and writes what it has to another, for tests.
//
//   copy_tensors FROM TO

#include <lockstep/checkpoint.h>

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  lockstep::save_tensors(argv[2], lockstep::load_tensors(argv[1]));
}
