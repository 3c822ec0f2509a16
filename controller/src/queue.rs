//! When each node is looked at next. Synchronous; the clock is the caller's.
//!
//! A change is acted on after a short wait, in which others of the same kind arrive (a wipe is one deletion a slice). A
//! node that fails, or that has to be written again and again because something else undoes it, waits longer each time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

/// How long a change waits for others, and how long it waits at most while they keep coming.
const DEBOUNCE: Duration = Duration::from_millis(100);
const LONGEST_DEBOUNCE: Duration = Duration::from_secs(1);

/// Wait after the first failure, and after the first repeated write; doubled each time.
const FIRST_DELAY: Duration = Duration::from_millis(250);

/// The longest wait.
const LONGEST_DELAY: Duration = Duration::from_secs(60);

/// A node that was quiet for so long starts anew.
const CALM: Duration = Duration::from_secs(120);

/// How a look at a node ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing was to do.
    Idle,
    /// Something was written.
    Wrote,
    /// It has to be looked at again at once: what was known of the server is wrong.
    Again,
    /// It failed and has to be tried again.
    Failed,
}

/// The nodes to look at.
#[derive(Debug, Default)]
pub struct Queue {
    /// Changed nodes.
    changed: BTreeMap<String, Change>,
    /// Nodes to look at then, changed or not.
    rechecks: BTreeMap<String, Instant>,
    busy: BTreeSet<String>,
    /// Marked while they were looked at.
    marked: BTreeSet<String>,
    pace: BTreeMap<String, Pace>,
}

#[derive(Clone, Copy, Debug)]
struct Change {
    first: Instant,
    due: Instant,
}

#[derive(Debug)]
struct Pace {
    failures: u32,
    writes: u32,
    last: Instant,
    not_before: Instant,
}

impl Queue {
    /// Something about `node` has changed.
    pub fn mark(&mut self, node: &str, now: Instant) {
        if self.busy.contains(node) {
            self.marked.insert(node.to_owned());
            return;
        }
        let not_before = self.not_before(node);
        let change = self.changed.entry(node.to_owned()).or_insert(Change { first: now, due: now });
        let due = (now + DEBOUNCE).min(change.first + LONGEST_DEBOUNCE);
        change.due = not_before.map_or(due, |not_before| due.max(not_before));
    }

    /// Looks at `node` at that time, if nothing makes it earlier.
    fn recheck(&mut self, node: &str, at: Instant) {
        let at = self.not_before(node).map_or(at, |not_before| at.max(not_before));
        self.rechecks.entry(node.to_owned()).and_modify(|due| *due = at.min(*due)).or_insert(at);
    }

    fn not_before(&self, node: &str) -> Option<Instant> {
        self.pace.get(node).map(|pace| pace.not_before)
    }

    fn due(&self) -> impl Iterator<Item = (&String, Instant)> {
        let changed = self.changed.iter().map(|(node, change)| (node, change.due));
        changed.chain(self.rechecks.iter().map(|(node, due)| (node, *due)))
    }

    /// The next node that is due; it is busy until [`finish`](Queue::finish).
    pub fn next(&mut self, now: Instant) -> Option<String> {
        let node = self.due().filter(|(_, due)| *due <= now).min_by_key(|(_, due)| *due)?.0.clone();
        self.changed.remove(&node);
        self.rechecks.remove(&node);
        self.busy.insert(node.clone());
        Some(node)
    }

    /// When the next node is due.
    pub fn next_due(&self) -> Option<Instant> {
        self.due().map(|(_, due)| due).min()
    }

    /// A look at `node` has ended. `recheck`: when time alone may make another one necessary.
    pub fn finish(&mut self, node: &str, outcome: Outcome, recheck: Option<Instant>, now: Instant) {
        self.busy.remove(node);
        let fresh = || Pace { failures: 0, writes: 0, last: now, not_before: now };
        let mut pace = self.pace.remove(node).filter(|pace| pace.last + CALM > now).unwrap_or_else(fresh);
        match outcome {
            Outcome::Idle => pace.failures = 0,
            Outcome::Wrote => {
                // The first write in a long time is followed by the second without more delay.
                pace.not_before = now + if pace.writes == 0 { DEBOUNCE } else { delay(pace.writes) };
                (pace.failures, pace.writes, pace.last) = (0, pace.writes.saturating_add(1), now);
            }
            Outcome::Again | Outcome::Failed => {
                pace.failures = pace.failures.saturating_add(1);
                // Once at once; but what fails in this way again and again waits as any other failure does.
                let at_once = outcome == Outcome::Again && pace.failures == 1;
                pace.not_before = if at_once { now } else { now + delay(pace.failures) };
                pace.last = now;
            }
        }
        let retry = matches!(outcome, Outcome::Again | Outcome::Failed).then_some(pace.not_before);
        if pace.failures > 0 || pace.writes > 0 {
            self.pace.insert(node.to_owned(), pace);
        }
        for at in retry.into_iter().chain(recheck) {
            self.recheck(node, at);
        }
        if self.marked.remove(node) {
            self.mark(node, now);
        }
    }
}

/// 250 ms, 500 ms, 1 s, ...
fn delay(times: u32) -> Duration {
    FIRST_DELAY.saturating_mul(1_u32.checked_shl(times.saturating_sub(1)).unwrap_or(u32::MAX)).min(LONGEST_DELAY)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Runs `node` as soon as it is due and says how long that took.
    fn turn(queue: &mut Queue, now: &mut Instant, outcome: Outcome) -> Duration {
        let due = queue.next_due().expect("something is due");
        let waited = due - *now;
        *now = due;
        let node = queue.next(due).expect("it is due");
        queue.finish(&node, outcome, None, due);
        waited
    }

    #[test]
    fn changes_are_gathered() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for wait in [0, 60, 120] {
            queue.mark("n", now + ms(wait));
        }
        assert_eq!(queue.next(now + ms(219)), None);
        assert_eq!(queue.next(now + ms(220)).as_deref(), Some("n"));
        assert_eq!(queue.next(now + ms(220)), None, "once");
        queue.mark("n", now + ms(230));
        assert_eq!(queue.next_due(), None, "never twice at the same time");
        queue.finish("n", Outcome::Idle, None, now + ms(240));
        assert_eq!(queue.next(now + ms(340)).as_deref(), Some("n"));
    }

    #[test]
    fn a_change_never_waits_for_ever() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for wait in 0..50 {
            queue.mark("n", now + ms(wait * 40));
        }
        assert_eq!(queue.next_due(), Some(now + ms(1000)));
    }

    #[test]
    fn failures_wait_longer_each_time() {
        let (mut queue, mut now) = (Queue::default(), Instant::now());
        queue.mark("n", now);
        let waits: Vec<_> = (0..12).map(|_| turn(&mut queue, &mut now, Outcome::Failed).as_millis()).collect();
        assert_eq!(waits, [100, 250, 500, 1000, 2000, 4000, 8000, 16000, 32000, 60000, 60000, 60000]);
        queue.mark("n", now);
        assert_eq!(queue.next(now + ms(1000)), None, "a change does not shorten the wait");
        turn(&mut queue, &mut now, Outcome::Idle);
        queue.mark("n", now);
        assert_eq!(turn(&mut queue, &mut now, Outcome::Failed), ms(100), "success clears it");
    }

    #[test]
    fn what_is_undone_again_and_again_is_written_more_and_more_rarely() {
        let (mut queue, mut now) = (Queue::default(), Instant::now());
        let mut waits = Vec::new();
        for _ in 0..12 {
            queue.mark("n", now);
            waits.push(turn(&mut queue, &mut now, Outcome::Wrote).as_millis());
        }
        assert_eq!(waits[..4], [100, 100, 250, 500], "a single wipe is repaired at once");
        assert_eq!(*waits.last().unwrap(), 60000);
        now += CALM;
        queue.mark("n", now);
        assert_eq!(turn(&mut queue, &mut now, Outcome::Wrote), ms(100));
        queue.mark("n", now);
        assert_eq!(turn(&mut queue, &mut now, Outcome::Wrote), ms(100), "calm is forgiven");
    }

    #[test]
    fn wrong_knowledge_is_repaired_at_once_but_not_for_ever() {
        let (mut queue, mut now) = (Queue::default(), Instant::now());
        queue.mark("n", now);
        let waits: Vec<_> = (0..4).map(|_| turn(&mut queue, &mut now, Outcome::Again).as_millis()).collect();
        assert_eq!(waits, [100, 0, 500, 1000]);
    }

    #[test]
    fn rechecks_come_by_the_clock() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.mark("n", now);
        queue.next(now + ms(100)).unwrap();
        queue.finish("n", Outcome::Idle, Some(now + ms(30_000)), now + ms(110));
        assert_eq!(queue.next_due(), Some(now + ms(30_000)));
        queue.mark("n", now + ms(200));
        assert_eq!(queue.next_due(), Some(now + ms(300)), "a change comes first");
        queue.next(now + ms(300)).unwrap();
        queue.finish("n", Outcome::Idle, None, now + ms(310));
        assert_eq!(queue.next_due(), None, "and makes the recheck needless");
    }
}
