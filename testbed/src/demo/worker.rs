//! One rank of the demo's job: data-parallel training on `libnccl.so.2`.
//!
//! Its job drives it through its pipes. Standard output: `id <hex>` (rank 0), `ready`, text for people, `done`. Standard input: `id <hex>`
//! (other ranks), `go`, `exit`.

use std::{
    ffi::c_void,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use fs_err as fs;

use super::{
    counters::Counters,
    model::{self, LAYERS, Samples, Weights},
    truth::{Collective, Configuration, Message, Truth},
};
use crate::{
    machine::set_link,
    nccl::{Buffer, Communicator, DeviceKind, Nccl, Reduce},
    random::{Random, fnv1a},
    ranks::{read_line, say, unique_id},
};

/// Which rank, and what it works from.
#[derive(Args, Debug)]
pub struct Arguments {
    /// Rank.
    #[arg(long)]
    rank: u32,
    /// JSON file with the [`Configuration`].
    #[arg(long)]
    configuration: PathBuf,
    /// Where the truth goes.
    #[arg(long)]
    truth: PathBuf,
}

/// Validation samples that a rank holds at a time.
const SHARD: usize = 64;
/// Bins of a rank in the evaluation's histogram.
const BINS: usize = 8;
/// Steps between evaluations.
const EVALUATE_EVERY: u32 = 5;
/// Elements of the buffer that is on its way when a link fails, 16 MiB: on an emulated wire for some 400 ms, and a link is down within
/// one or two, unless the machine is busy.
const LARGE: usize = 1 << 22;
/// Learning rate.
const RATE: f32 = 0.3;

/// Unix nanoseconds.
fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}

/// When the stream was before a collective, and when behind it.
type Passage = [AtomicU64; 2];

/// Put on the stream before and behind a collective: notes when the stream got there.
unsafe extern "C" fn note_time(slot: *mut c_void) {
    // SAFETY: `slot` is one of `Rank::passages`, which outlive the stream's work.
    let slot = unsafe { &*slot.cast::<AtomicU64>() };
    // Relaxed: read after the stream was synchronised, which orders it.
    slot.store(now_ns(), Ordering::Relaxed);
}

/// Waits until an operation has begun to change the data it is at. `before`: an element's value until then, by its index.
fn await_change(data: &mut [f32], before: impl Fn(usize) -> f32) {
    // What is not zero changes: the mean of all ranks is none's own.
    let places: Vec<(&AtomicU32, u32)> = data
        .iter_mut()
        .enumerate()
        .skip(1)
        .step_by(1000)
        .map(|(at, value)| {
            // SAFETY: aligned, and of the operation's life. It is the device's, whose stores are another thread's.
            let place = unsafe { AtomicU32::from_ptr(std::ptr::from_mut(value).cast()) };
            (place, before(at).to_bits())
        })
        .collect();
    // Relaxed: it says only when.
    while places
        .iter()
        .all(|(place, before)| place.load(Ordering::Relaxed) == *before)
    {
        thread::yield_now();
    }
}

/// Runs the rank.
///
/// # Errors
/// The library's, or whatever made the training go wrong.
pub fn run(arguments: &Arguments) -> Result<()> {
    let text = fs::read_to_string(&arguments.configuration)?;
    let configuration: Configuration = serde_json::from_str(&text).context("configuration")?;
    let nccl = Nccl::open(Path::new("libnccl.so.2"), DeviceKind::Host)?;
    let id = unique_id(&nccl, arguments.rank == 0)?;
    let communicator = nccl.communicator(configuration.ranks, id, arguments.rank)?;
    let counters = Counters::open();
    say("ready")?;
    read_line("go")?;

    let mut rank = Rank::new(&communicator, &configuration, arguments.rank)?;
    if let Some(counters) = &counters {
        rank.truth.events_at_gate = counters.emitted();
    }
    rank.train()?;
    let mut truth = rank.finish();
    say("done")?;
    read_line("exit")?;
    communicator.destroy()?;
    if let Some(counters) = &counters {
        truth.events = counters.emitted();
        truth.ring_lost = counters.lost();
    }
    let text = serde_json::to_string(&truth)?;
    Ok(fs::write(&arguments.truth, text)?)
}

/// The training state of one rank.
struct Rank<'a> {
    communicator: &'a Communicator<'a>,
    configuration: &'a Configuration,
    rank: u32,
    truth: Truth,
    /// One a collective, written by the stream.
    passages: Box<[Passage]>,
    step: u32,
    slept_ms: u32,
    random: Random,
    weights: Weights,
    /// Gradient of each layer; the last layer's has the loss behind it.
    gradients: Vec<Buffer>,
    /// Validation samples held now: the rank that they came from, then points and labels.
    shard: [Buffer; 2],
    /// Correct answers and samples of each bin of all ranks; then of this rank's bins; then of all ranks again.
    histogram: [Buffer; 3],
}

impl<'a> Rank<'a> {
    fn new(communicator: &'a Communicator<'a>, configuration: &'a Configuration, rank: u32) -> Result<Self> {
        let buffer = |elements| communicator.buffer(elements);
        let ranks = configuration.ranks as usize;
        // Rank 0's weights are the ones that all will train: others begin with different ones and get them by broadcast.
        let mut random = Random::new(configuration.seed ^ (u64::from(rank) << 32));
        let weights = model::initial(&mut random);
        let gradients = (0..LAYERS)
            .map(|layer| buffer(model::parameters(layer) + usize::from(layer == LAYERS - 1)))
            .collect::<Result<_>>()?;
        let validation = Samples::draw(&mut random, SHARD);
        let mut shard = [buffer(1 + 3 * SHARD)?, buffer(1 + 3 * SHARD)?];
        let held = shard[0].get();
        held[0] = rank as f32;
        held[1..=2 * SHARD].copy_from_slice(&validation.points);
        held[1 + 2 * SHARD..].copy_from_slice(&validation.labels);
        let histogram = [
            buffer(2 * BINS * ranks)?,
            buffer(2 * BINS)?,
            buffer(2 * BINS * ranks)?,
        ];
        let collectives = LAYERS * (1 + configuration.steps as usize) + 2 * configuration.steps as usize + 1;
        Ok(Self {
            communicator,
            configuration,
            rank,
            truth: Truth {
                rank,
                pid: std::process::id(),
                host: std::env::var("NCCL_HOSTID").unwrap_or_default(),
                ..Truth::default()
            },
            passages: (0..collectives).map(|_| Passage::default()).collect(),
            step: 0,
            slept_ms: 0,
            random,
            weights,
            gradients,
            shard,
            histogram,
        })
    }

    /// Calls a collective, with everything about it noted.
    fn collective(&mut self, name: &str, bytes: usize, call: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        let [arrival, departure] = self
            .passages
            .get(self.truth.collectives.len())
            .context("more collectives than planned")?;
        // SAFETY: the slots live in a box that `train` keeps until the stream is synchronised.
        let note = |slot: &AtomicU64| unsafe {
            self.communicator
                .host_function(note_time, std::ptr::from_ref(slot).cast_mut().cast())
        };
        let queued_ns = now_ns();
        note(arrival)?;
        let called_ns = now_ns();
        call(self)?;
        let returned_ns = now_ns();
        note(departure)?;
        self.truth.collectives.push(Collective {
            name: name.to_owned(),
            step: self.step,
            bytes: bytes as u64,
            queued_ns,
            called_ns,
            returned_ns,
            arrived_ns: 0,
            left_ns: 0,
            slept_ms: std::mem::take(&mut self.slept_ms),
        });
        Ok(())
    }

    fn train(&mut self) -> Result<()> {
        let result = self.steps();
        // Also after an error: the stream may still write to buffers and arrival slots.
        let synchronised = self.communicator.synchronise();
        result.and(synchronised)
    }

    fn steps(&mut self) -> Result<()> {
        let start = Instant::now();
        self.broadcast_weights()?;
        for step in 1..=self.configuration.steps {
            self.step = step;
            if let Some(delay) = self
                .configuration
                .delays
                .iter()
                .find(|d| d.step == step && d.rank == self.rank)
            {
                thread::sleep(Duration::from_millis(delay.ms.into()));
                self.slept_ms = delay.ms;
            }
            if step % EVALUATE_EVERY == 0 {
                self.evaluate()?;
            }
            self.train_step()?;
            if let Some(wire) = self.configuration.wire.as_ref().filter(|wire| wire.step == step) {
                self.lose(&wire.link)?;
            }
            if self.rank == 0 && (step % 10 == 0 || step == 1 || step == self.configuration.steps) {
                let loss = self.truth.loss.last().copied().unwrap_or_default();
                let accuracy = self
                    .truth
                    .accuracy
                    .last()
                    .map_or_else(String::new, |a| format!("  accuracy {:.1} %", 100.0 * a));
                say(&format!("step {step:>4}  loss {loss:.4}{accuracy}"))?;
            }
            if self.configuration.pace_ms > 0 {
                thread::sleep(Duration::from_millis(self.configuration.pace_ms));
            }
        }
        self.truth.loop_ns = start.elapsed().as_nanos() as u64;
        Ok(())
    }

    /// Averages a large buffer, while which is on its way rank 0 takes a link down.
    fn lose(&mut self, link: &str) -> Result<()> {
        let ranks = self.configuration.ranks;
        let mut large = self.communicator.buffer(LARGE)?;
        let factor = (self.rank + 1) as f32;
        let own = |at| factor * (at % 1000) as f32;
        large
            .get()
            .iter_mut()
            .enumerate()
            .for_each(|(at, value)| *value = own(at));
        self.collective("all_reduce", 4 * LARGE, |rank| {
            rank.communicator.all_reduce(&large, Reduce::Avg)
        })?;
        if self.rank == 0 {
            await_change(large.get(), own);
        }
        let taken = if self.rank == 0 {
            set_link(link, false)
        } else {
            Ok(())
        };
        // The buffer is the operation's until then.
        self.communicator.synchronise()?;
        taken.with_context(|| format!("taking {link} down"))?;
        let mean = (ranks + 1) as f32 / 2.0;
        let wrong = large
            .get()
            .iter()
            .enumerate()
            .find(|(at, value)| **value != mean * (at % 1000) as f32);
        if let Some((at, value)) = wrong {
            bail!(
                "after the link had failed element {at} is {value}, not {}",
                mean * (at % 1000) as f32
            );
        }
        if self.rank == 0 {
            say(&format!("link {link} down"))?;
        }
        Ok(())
    }

    fn broadcast_weights(&mut self) -> Result<()> {
        for layer in 0..LAYERS {
            let count = self.weights[layer].len();
            self.gradients[layer].get()[..count].copy_from_slice(&self.weights[layer]);
        }
        for layer in 0..LAYERS {
            let bytes = 4 * self.gradients[layer].len();
            self.collective("broadcast", bytes, |rank| {
                rank.communicator.broadcast(&rank.gradients[layer], 0)
            })?;
        }
        self.communicator.synchronise()?;
        for layer in 0..LAYERS {
            let count = self.weights[layer].len();
            self.weights[layer].copy_from_slice(&self.gradients[layer].get()[..count]);
        }
        Ok(())
    }

    /// Forward, backward with each layer's gradients on their way while the next layer's are computed, and the update.
    fn train_step(&mut self) -> Result<()> {
        let samples = Samples::draw(&mut self.random, self.configuration.batch as usize);
        let weights = std::mem::take(&mut self.weights);
        let activations = model::forward(&weights, &samples.points);
        let loss = activations.loss(&samples.labels);
        model::backward(&weights, &activations, &samples.labels, |layer, gradient| {
            let buffer = self.gradients[layer].get();
            buffer[..gradient.len()].copy_from_slice(gradient);
            if layer == LAYERS - 1 {
                buffer[gradient.len()] = loss;
            }
            let bytes = 4 * buffer.len();
            self.collective("all_reduce", bytes, |rank| {
                rank.communicator.all_reduce(&rank.gradients[layer], Reduce::Avg)
            })
        })?;
        self.communicator.synchronise()?;
        self.weights = weights;
        for (weights, gradient) in self.weights.iter_mut().zip(&mut self.gradients) {
            for (weight, slope) in weights.iter_mut().zip(gradient.get().iter()) {
                *weight -= RATE * slope;
            }
        }
        let loss = self.gradients[LAYERS - 1]
            .get()
            .last()
            .copied()
            .context("the loss has no place")?;
        if !loss.is_finite() {
            bail!("the loss is {loss} after step {}", self.step);
        }
        self.truth.loss.push(loss);
        Ok(())
    }

    /// Accuracy over all ranks' validation samples: each rank counts by bins of the abscissa, sums its own bins over
    /// all ranks and shares them. Then the samples move on to the next rank, so that each sees all in time.
    fn evaluate(&mut self) -> Result<()> {
        let ranks = self.configuration.ranks as usize;
        let held = self.shard[0].get().to_vec();
        let (points, labels) = held[1..].split_at(2 * SHARD);
        let activations = model::forward(&self.weights, points);
        let bins = self.histogram[0].get();
        bins.fill(0.0);
        for ((logit, label), point) in activations
            .logits()
            .iter()
            .zip(labels)
            .zip(points.chunks_exact(2))
        {
            let all = BINS * ranks;
            // The moons lie between -1.2 and 2.2.
            let bin = ((point[0] + 1.2) / 3.4 * all as f32).clamp(0.0, all as f32 - 1.0) as usize;
            bins[2 * bin] += f32::from((*logit > 0.0) == (*label > 0.5));
            bins[2 * bin + 1] += 1.0;
        }
        let bytes = 4 * self.histogram[0].len();
        self.collective("reduce_scatter", bytes, |rank| {
            rank.communicator
                .reduce_scatter(&rank.histogram[0], &rank.histogram[1])
        })?;
        self.collective("all_gather", bytes, |rank| {
            rank.communicator
                .all_gather(&rank.histogram[1], &rank.histogram[2])
        })?;
        self.rotate()?;
        self.communicator.synchronise()?;
        let all = self.histogram[2].get();
        let (right, total) = all
            .chunks_exact(2)
            .fold((0.0, 0.0), |sum, bin| (sum.0 + bin[0], sum.1 + bin[1]));
        if total as usize != SHARD * ranks {
            bail!(
                "the histogram holds {total} samples, {} were counted",
                SHARD * ranks
            );
        }
        self.truth.accuracy.push(right / total);
        self.shard.swap(0, 1);
        let turns = self.truth.accuracy.len() as u32 % self.configuration.ranks;
        let origin = (self.rank + self.configuration.ranks - turns) % self.configuration.ranks;
        let came_from = self.shard[0].get()[0];
        if came_from as u32 != origin {
            bail!(
                "rank {} got the samples of rank {came_from}, not of rank {origin}",
                self.rank
            );
        }
        Ok(())
    }

    fn rotate(&mut self) -> Result<()> {
        let ranks = self.configuration.ranks;
        let (next, previous) = ((self.rank + 1) % ranks, (self.rank + ranks - 1) % ranks);
        let message = Message {
            peer: next,
            bytes: 4 * self.shard[0].len() as u64,
            called_ns: now_ns(),
        };
        self.communicator
            .exchange(&self.shard[0], next, &self.shard[1], previous)?;
        self.truth.sent.push(message.clone());
        self.truth.received.push(Message {
            peer: previous,
            ..message
        });
        Ok(())
    }

    fn finish(mut self) -> Truth {
        for (collective, passage) in self.truth.collectives.iter_mut().zip(&self.passages) {
            // Relaxed: the stream was synchronised after its last store.
            [collective.arrived_ns, collective.left_ns] =
                passage.each_ref().map(|at| at.load(Ordering::Relaxed));
        }
        let bits = self
            .weights
            .iter()
            .flatten()
            .flat_map(|weight| weight.to_bits().to_le_bytes());
        let hash = fnv1a(bits);
        self.truth.weights = format!("{hash:016x}");
        self.truth
    }
}
