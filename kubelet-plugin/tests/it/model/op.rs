//! What can happen to a node.
//!
//! Numbers pick among what there is when an operation comes, so that any part of a sequence is a sequence too. One for which
//! there is nothing to pick does nothing.

use kerf_nvml::Code;

/// Random numbers from a seed: SplitMix64.
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

/// One operation.
#[derive(Clone, Debug)]
pub(super) enum Op {
    /// The kubelet calls.
    Call(Call),
    /// The kubelet calls, and the plugin dies before or after one of its steps.
    Crash { call: Call, moment: usize },
    /// The kubelet calls, and a call of NVML fails.
    Fault { call: Call, function: &'static str, nth: u32, code: Code, after: bool },
    /// During a rolling update both plugins are called at the same time.
    Both(Ask, Ask),
    /// A plugin starts anew.
    Restart { engine: usize, patient: bool },
    /// The background goes on with what could not be released.
    Retry { engine: usize },
    /// The node is compared with the API server, so many minutes later. Without an answer where there is an outage.
    Reconcile { engine: usize, minutes: u64, outage: bool },
    /// A claim is deleted from the API server, and the kubelet does not tell.
    Vanishes(usize),
    /// The driver is loaded anew.
    Reload,
    /// The node is booted.
    Reboot,
    /// Somebody else makes an instance.
    ForeignComes { gpu: usize, device: usize, compute: bool },
    /// Somebody else removes one of his.
    ForeignGoes(usize),
    /// Somebody else removes one of a claim.
    Robbed(usize),
    /// A process uses an instance or a GPU.
    BusyComes(usize),
    /// It ends.
    BusyGoes(usize),
    /// A file of a claim is lost or damaged.
    Spoilt { claim: usize, file: Which, content: Option<&'static str> },
}

/// A file of a claim.
#[derive(Clone, Copy, Debug)]
pub(super) enum Which {
    Journal,
    Cdi,
}

/// A call of the kubelet to one of two plugins.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) engine: usize,
    pub(super) ask: Ask,
}

#[derive(Clone, Debug)]
pub(super) enum Ask {
    /// Prepare of a claim that was never seen, for devices by GPU and number, free or not.
    New(Vec<(usize, usize)>),
    /// Prepare of one that was seen.
    Again(usize),
    /// Unprepare of one that was seen.
    Unprepare(usize),
    /// Unprepare of one that was not.
    Stranger,
}

/// The functions of NVML that fail.
const FUNCTIONS: [&str; 13] = [
    "gpu_at",
    "facts",
    "mig_modes",
    "set_mig_mode",
    "gpu_instance_profiles",
    "gpu_instances",
    "create_gpu_instance",
    "destroy_gpu_instance",
    "compute_instances",
    "create_compute_instance",
    "destroy_compute_instance",
    "driver_version",
    "processes",
];

/// How they fail. Not with what tells that something is not there, which the engine has to believe.
const CODES: [Code; 5] =
    [Code::Unknown, Code::Timeout, Code::InUse, Code::InsufficientResources, Code::DriverNotLoaded];

/// What is found in files that are not whole.
const RUBBISH: [&str; 4] = ["", "{", "{\"version\": 1, \"cl", "{\"version\": \"7\", \"invented\": true}"];

impl Random {
    /// Seeds that follow each other have nothing in common.
    pub(super) fn new(seed: u64) -> Random {
        Random(mix(seed ^ 0x6b65_7266))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Less than `bound`.
    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).expect("it is less than a usize")
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn percent(&mut self, share: usize) -> bool {
        self.below(100) < share
    }

    /// To pick with.
    fn pick(&mut self) -> usize {
        self.below(1000)
    }
}

fn mix(number: u64) -> u64 {
    let mixed = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Op {
    pub(super) fn random(random: &mut Random) -> Op {
        match random.below(100) {
            0..28 => Op::Call(Call::random(random)),
            28..40 => Op::Crash { call: Call::random(random), moment: random.below(26) },
            40..55 => Op::Fault {
                call: Call::random(random),
                function: random.one_of(&FUNCTIONS),
                nth: random.one_of(&[1, 1, 1, 2, 3]),
                code: random.one_of(&CODES),
                after: random.percent(30),
            },
            55..63 => Op::Both(Ask::random(random), Ask::random(random)),
            63..65 => Op::Restart { engine: random.below(2), patient: random.percent(40) },
            65..69 => Op::Retry { engine: random.below(2) },
            69..74 => Op::Reconcile {
                engine: random.below(2),
                minutes: random.one_of(&[1, 2, 3]),
                outage: random.percent(25),
            },
            74..77 => Op::Vanishes(random.pick()),
            77..78 => Op::Reload,
            78..79 => Op::Reboot,
            79..84 => Op::ForeignComes { gpu: random.below(4), device: random.pick(), compute: random.percent(50) },
            84..86 => Op::ForeignGoes(random.pick()),
            86..87 => Op::Robbed(random.pick()),
            87..92 => Op::BusyComes(random.pick()),
            92..96 => Op::BusyGoes(random.pick()),
            _ => Op::Spoilt {
                claim: random.pick(),
                file: random.one_of(&[Which::Journal, Which::Cdi]),
                content: random.percent(60).then(|| random.one_of(&RUBBISH)),
            },
        }
    }
}

impl Call {
    fn random(random: &mut Random) -> Call {
        Call { engine: random.below(2), ask: Ask::random(random) }
    }
}

impl Ask {
    fn random(random: &mut Random) -> Ask {
        match random.below(100) {
            0..45 => {
                let number = random.one_of(&[1, 1, 1, 1, 2, 3]);
                Ask::New((0..number).map(|_| (random.below(4), random.pick())).collect())
            }
            45..62 => Ask::Again(random.pick()),
            62..98 => Ask::Unprepare(random.pick()),
            _ => Ask::Stranger,
        }
    }
}
