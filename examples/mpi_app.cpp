// Inside an application that owns MPI: a solver's processes train a model of what they compute.
//
//   mpirun -n 2 build/release/examples/mpi_app
//
// The application initialises and finalises MPI and goes on using its communicators; lockstep makes
// a copy of the one it is given. Here a heat equation is solved, each process on its part of a rod,
// and all learn together to predict the next temperature from three neighbours. Expected: three
// weights near 0.20, 0.60, 0.20.

#include <lockstep/lockstep.h>
#include <lockstep/mpi.h>
#include <mpi.h>
#include <torch/torch.h>

#include <cstdio>

// One step of time on this process's part; the ends come from the neighbours.
torch::Tensor diffuse(const torch::Tensor& rod, int rank, int size) {
  float left = rod[0].item<float>();
  float right = rod[-1].item<float>();
  const float my_left = left;
  const float my_right = right;
  const int before = rank > 0 ? rank - 1 : MPI_PROC_NULL;
  const int after = rank + 1 < size ? rank + 1 : MPI_PROC_NULL;
  MPI_Sendrecv(&my_right, 1, MPI_FLOAT, after, 0, &left, 1, MPI_FLOAT, before, 0, MPI_COMM_WORLD,
               MPI_STATUS_IGNORE);
  MPI_Sendrecv(&my_left, 1, MPI_FLOAT, before, 1, &right, 1, MPI_FLOAT, after, 1, MPI_COMM_WORLD,
               MPI_STATUS_IGNORE);
  return torch::cat({torch::tensor({left}), rod, torch::tensor({right})});
}

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  int code = 0;
  try {
    const auto world = lockstep::join_mpi(MPI_COMM_WORLD);
    torch::set_num_threads(1);
    torch::manual_seed(1 + world.rank());
    auto model = torch::nn::Linear(torch::nn::LinearOptions(3, 1).bias(false));
    lockstep::DistributedDataParallel ddp(model, world);
    lockstep::optim::Adam optimizer(model->parameters(), 0.02);

    auto rod = torch::rand({500});
    for (int step = 0; step < 800; ++step) {
      const auto with_ends = diffuse(rod, world.rank(), world.size());
      const auto neighbours = with_ends.unfold(0, 3, 1);  // a row for each place
      const auto next = neighbours.matmul(torch::tensor({0.2f, 0.6f, 0.2f}));
      optimizer.zero_grad();
      torch::mse_loss(model->forward(neighbours).squeeze(1), next).backward();
      optimizer.step();
      rod = next + 0.3 * torch::rand({500});  // something keeps heating it
      rod = rod - rod.mean();
    }
    const auto weights = model->weight.detach()[0];
    if (world.rank() == 0) {
      std::printf("weights %.2f %.2f %.2f\n", weights[0].item<float>(), weights[1].item<float>(),
                  weights[2].item<float>());
    }
    code = torch::allclose(weights, torch::tensor({0.2f, 0.6f, 0.2f}), 0, 0.02) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);  // the application's decision, never lockstep's
  }
  MPI_Finalize();
  return code;
}
