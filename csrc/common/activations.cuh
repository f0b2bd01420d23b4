// The numbers of activations. Written by .ci/activations.py from ActivationCode in fp4_inductor/ops/activation.py: change them there.
#pragma once

namespace fp4 {

enum Activation {
  kNone = 0,
  kSilu = 1,
  kGelu = 2,
  kGeluTanh = 3,
  kRelu = 4,
};
constexpr Activation kLastActivation = kRelu;

}  // namespace fp4
