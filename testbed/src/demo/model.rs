//! A small real model: a perceptron with two hidden layers that separates two interleaved half-moons.

use crate::random::Random;

/// Width of each layer, input first.
pub(crate) const WIDTHS: [usize; 4] = [2, 48, 48, 1];
/// Layers with parameters.
pub(crate) const LAYERS: usize = WIDTHS.len() - 1;

/// Parameters of layer `layer`: its weights row by row (one row an output), then its biases.
pub(crate) const fn parameters(layer: usize) -> usize {
    (WIDTHS[layer] + 1) * WIDTHS[layer + 1]
}

/// Points of two half-moons and which moon each is on (0 or 1).
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Samples {
    /// `x0, y0, x1, y1, …`.
    pub(crate) points: Vec<f32>,
    /// One number a point.
    pub(crate) labels: Vec<f32>,
}

impl Samples {
    /// Draws `count` points with noise.
    pub(crate) fn draw(random: &mut Random, count: usize) -> Self {
        let mut samples = Self::default();
        for i in 0..count {
            let angle = std::f32::consts::PI * random.unit();
            let (x, y, label) = if i % 2 == 0 {
                (angle.cos(), angle.sin(), 0.0)
            } else {
                (1.0 - angle.cos(), 0.5 - angle.sin(), 1.0)
            };
            samples
                .points
                .extend([x + 0.2 * (random.unit() - 0.5), y + 0.2 * (random.unit() - 0.5)]);
            samples.labels.push(label);
        }
        samples
    }
}

/// Parameters of each layer.
pub(crate) type Weights = [Vec<f32>; LAYERS];

/// Small random weights, zero biases.
pub(crate) fn initial(random: &mut Random) -> Weights {
    std::array::from_fn(|layer| {
        let (inputs, outputs) = (WIDTHS[layer], WIDTHS[layer + 1]);
        let scale = (6.0 / (inputs + outputs) as f32).sqrt();
        let mut weights: Vec<f32> = (0..inputs * outputs)
            .map(|_| scale * (2.0 * random.unit() - 1.0))
            .collect();
        weights.resize(parameters(layer), 0.0);
        weights
    })
}

/// What the forward pass keeps for the backward pass: the output of each layer, the samples' points first, row by row.
#[derive(Debug)]
pub(crate) struct Activations {
    outputs: Vec<Vec<f32>>,
}

/// Runs the model; the last layer's outputs are logits.
pub(crate) fn forward(weights: &Weights, points: &[f32]) -> Activations {
    let rows = points.len() / WIDTHS[0];
    let mut outputs = vec![points.to_vec()];
    for (layer, parameters) in weights.iter().enumerate() {
        let (inputs, width) = (WIDTHS[layer], WIDTHS[layer + 1]);
        let (matrix, biases) = parameters.split_at(inputs * width);
        let previous = &outputs[layer];
        let mut next = Vec::with_capacity(rows * width);
        for row in previous.chunks_exact(inputs) {
            for (weights, bias) in matrix.chunks_exact(inputs).zip(biases) {
                let sum = bias + row.iter().zip(weights).map(|(x, w)| x * w).sum::<f32>();
                next.push(if layer + 1 < LAYERS { sum.tanh() } else { sum });
            }
        }
        outputs.push(next);
    }
    Activations { outputs }
}

impl Activations {
    /// Logits, one a sample.
    pub(crate) fn logits(&self) -> &[f32] {
        &self.outputs[LAYERS]
    }

    /// Mean logistic loss.
    pub(crate) fn loss(&self, labels: &[f32]) -> f32 {
        let sum: f32 = self
            .logits()
            .iter()
            .zip(labels)
            // ln(1 + e^z) - y z, in a form that does not overflow.
            .map(|(z, y)| z.max(0.0) - y * z + (-z.abs()).exp().ln_1p())
            .sum();
        sum / labels.len() as f32
    }
}

/// Runs the backward pass, last layer first. `done(layer, gradient)` is called as soon as a layer's gradient of the mean
/// loss is known, so that it can be sent while earlier layers are still worked on.
pub(crate) fn backward<E>(
    weights: &Weights,
    activations: &Activations,
    labels: &[f32],
    mut done: impl FnMut(usize, &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let rows = labels.len();
    // Derivative of the loss by each layer's sums: sigmoid(z) - y at the end.
    let mut deltas: Vec<f32> = activations
        .logits()
        .iter()
        .zip(labels)
        .map(|(z, y)| (1.0 / (1.0 + (-z).exp()) - y) / rows as f32)
        .collect();
    for layer in (0..LAYERS).rev() {
        let (inputs, width) = (WIDTHS[layer], WIDTHS[layer + 1]);
        let previous = &activations.outputs[layer];
        let mut gradient = vec![0.0; parameters(layer)];
        let (matrix, biases) = gradient.split_at_mut(inputs * width);
        for (row, delta) in previous.chunks_exact(inputs).zip(deltas.chunks_exact(width)) {
            for ((weights, bias), d) in matrix.chunks_exact_mut(inputs).zip(biases.iter_mut()).zip(delta) {
                *bias += d;
                for (weight, x) in weights.iter_mut().zip(row) {
                    *weight += d * x;
                }
            }
        }
        done(layer, &gradient)?;
        if layer == 0 {
            break;
        }
        let matrix = &weights[layer][..inputs * width];
        let mut before = vec![0.0; rows * inputs];
        for ((target, row), delta) in before
            .chunks_exact_mut(inputs)
            .zip(previous.chunks_exact(inputs))
            .zip(deltas.chunks_exact(width))
        {
            for (weights, d) in matrix.chunks_exact(inputs).zip(delta) {
                for (t, w) in target.iter_mut().zip(weights) {
                    *t += d * w;
                }
            }
            for (t, x) in target.iter_mut().zip(row) {
                *t *= 1.0 - x * x;
            }
        }
        deltas = before;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_match_differences() {
        let mut random = Random::new(3);
        let (mut weights, samples) = (initial(&mut random), Samples::draw(&mut random, 16));
        let mut gradients: Vec<Vec<f32>> = vec![Vec::new(); LAYERS];
        let activations = forward(&weights, &samples.points);
        backward(&weights, &activations, &samples.labels, |layer, gradient| {
            gradients[layer] = gradient.to_vec();
            Ok::<_, ()>(())
        })
        .unwrap();
        for layer in 0..LAYERS {
            // One weight, one bias.
            for index in [1, parameters(layer) - 1] {
                let kept = weights[layer][index];
                let mut loss_at = |value: f32| {
                    weights[layer][index] = value;
                    f64::from(forward(&weights, &samples.points).loss(&samples.labels))
                };
                let step = 1e-2;
                let slope = (loss_at(kept + step) - loss_at(kept - step)) / f64::from(2.0 * step);
                weights[layer][index] = kept;
                let error = (slope - f64::from(gradients[layer][index])).abs();
                assert!(
                    error < 2e-3,
                    "layer {layer} parameter {index}: {slope} against {}",
                    gradients[layer][index]
                );
            }
        }
    }

    #[test]
    fn descent_learns_the_moons() {
        let mut random = Random::new(5);
        let (mut weights, samples) = (initial(&mut random), Samples::draw(&mut random, 128));
        let mut losses = Vec::new();
        for _ in 0..200 {
            let activations = forward(&weights, &samples.points);
            losses.push(activations.loss(&samples.labels));
            let mut gradients: [Vec<f32>; LAYERS] = Default::default();
            backward(&weights, &activations, &samples.labels, |layer, gradient| {
                gradients[layer] = gradient.to_vec();
                Ok::<_, ()>(())
            })
            .unwrap();
            for (weights, gradient) in weights.iter_mut().zip(&gradients) {
                for (w, g) in weights.iter_mut().zip(gradient) {
                    *w -= 0.5 * g;
                }
            }
        }
        assert!(losses[199] < 0.5 * losses[0], "{} -> {}", losses[0], losses[199]);
    }
}
