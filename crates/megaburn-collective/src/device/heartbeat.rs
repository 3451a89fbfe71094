//! How the members of a group learn each other's progress: over the host transport and on another
//! thread than the main one, which may be blocked on its GPU.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use burn::tensor::{Bytes, DType};

use super::{
    call_log::{CallDigest, Disagreement},
    watched::Watched,
};
use crate::{
    busy::Busy,
    call::{Call, Collective},
    clock,
    deadline::Deadline,
    message::{Message, Payload},
    transport::{SILENT, Transport},
};

/// The interval at which members report to and ask each other.
pub(super) const ROUND: Duration = Duration::from_secs(1);

/// What this rank knows about one group's members.
#[derive(Debug, Default)]
pub(super) struct HeartbeatRound {
    /// When a call last ended on this rank's GPU.
    pub(super) progress: Option<Instant>,
    compared: Option<Instant>,
    told: Option<Instant>,
    told_made: u64,
    /// When this rank first asked about the call that is waiting.
    asked: Option<Instant>,
    /// By member: its latest digest and when it arrived.
    heard: HashMap<usize, (CallDigest, Instant)>,
}

impl HeartbeatRound {
    /// Receives the members' digests; returns the first member that made different calls.
    pub(super) fn listen(
        &mut self,
        now: Instant,
        group: &Watched,
        transport: &dyn Transport,
    ) -> Option<(usize, Disagreement)> {
        let mut asked = false;
        let mut news = false;
        for peer in group.others() {
            while let Some(message) = transport.arrived(peer, group.channel) {
                let said = serde_json::from_slice::<CallDigest>(message.payload.as_slice());
                let Ok(bulletin) = said else { continue };
                asked |= bulletin.asks;
                news = true;
                self.heard.insert(peer, (bulletin, now));
            }
        }
        if asked {
            send(group, transport, false, group.others());
        }
        // Once a second, compare old digests too: this rank may have reached the call where the
        // member was.
        if !news
            && self
                .compared
                .is_some_and(|compared| now.duration_since(compared) < ROUND)
        {
            return None;
        }
        self.compared = Some(now);
        let log = group.log();
        let differs = |(peer, (bulletin, _)): (&usize, &(CallDigest, Instant))| {
            log.differs(bulletin).map(|found| (*peer, found))
        };
        self.heard.iter().find_map(differs)
    }

    /// Runs once a second. Without a waiting call, sends this rank's digest to the next member if
    /// calls were made since the last time. With one, sends it to all members and asks for their
    /// answers.
    pub(super) fn tell(
        &mut self,
        now: Instant,
        group: &Watched,
        transport: &dyn Transport,
        waits: bool,
    ) {
        if !waits {
            self.asked = None;
        }
        if self
            .told
            .is_some_and(|told| now.duration_since(told) < ROUND)
        {
            return;
        }
        let made = group.log().made();
        if waits {
            self.asked.get_or_insert(now);
            send(group, transport, true, group.others());
        } else if made > self.told_made {
            let next = group
                .members
                .iter()
                .position(|member| *member == group.rank);
            let next = next.map(|me| group.members[(me + 1) % group.members.len()]);
            send(group, transport, false, next.into_iter());
        }
        self.told = Some(now);
        self.told_made = made;
    }

    /// The member that most likely keeps the others waiting for call `seq`: one that does not
    /// answer, else one that has not made the call, else any.
    pub(super) fn unresponsive_peer(&self, group: &Watched, seq: u64) -> usize {
        let others: Vec<_> = group.others().collect();
        let silent = |peer: &&usize| {
            let heard = self.heard.get(*peer).map(|(_, when)| *when);
            self.asked
                .is_some_and(|asked| heard.is_none_or(|heard| heard < asked))
        };
        let behind = |peer: &&usize| {
            let last = self
                .heard
                .get(*peer)
                .and_then(|(bulletin, _)| bulletin.recent.last());
            last.is_none_or(|last| last.seq < seq)
        };
        let unresponsive_peer = others
            .iter()
            .find(silent)
            .or_else(|| others.iter().find(behind));
        unresponsive_peer
            .or(others.first())
            .copied()
            .unwrap_or(group.rank)
    }

    /// A member that is known to be in a long phase and therefore has not made call `seq`. `None`
    /// if a member no longer answers, because that member is then to blame.
    pub(super) fn at_work(&self, now: Instant, group: &Watched, seq: u64) -> Option<Busy> {
        let mut most: Option<Busy> = None;
        for peer in group.others() {
            let (bulletin, when) = self.heard.get(&peer)?;
            let ago = now.saturating_duration_since(*when);
            if ago >= SILENT {
                return None;
            }
            let is_behind = bulletin.recent.last().is_none_or(|last| last.seq < seq);
            let busy = bulletin.busy.clone().filter(|_| is_behind);
            let busy = busy.map(|busy| busy.after(ago));
            most = most.into_iter().chain(busy).max_by_key(Busy::left);
        }
        most
    }

    pub(super) fn dump(&self, group: &Watched) -> String {
        let mut text = format!("last known state of the members of group {}:\n", group.name);
        for peer in group.others() {
            let line = match self.heard.get(&peer) {
                None => "no message yet".to_string(),
                Some((bulletin, when)) => {
                    let last = bulletin
                        .recent
                        .last()
                        .map_or("nothing".into(), Call::to_string);
                    let ago = clock::now().saturating_duration_since(*when).as_secs_f64();
                    format!(
                        "made {} calls, last {last}; reported {ago:.1} s ago",
                        bulletin.made
                    )
                }
            };
            text += &format!("  rank {peer}: {line}\n");
        }
        text
    }
}

/// Sends this rank's digest. A member that cannot be reached is reported by the transport.
fn send(
    group: &Watched,
    transport: &dyn Transport,
    asks: bool,
    peers: impl Iterator<Item = usize>,
) {
    let busy = transport.activity().busy();
    let mut bulletin = group.log().bulletin(asks);
    bulletin.busy = busy;
    let call = Call {
        op: Collective::Send,
        seq: 0,
        dtype: DType::U8,
        shape: Vec::new(),
    };
    let bytes = serde_json::to_vec(&bulletin).expect("a bulletin is serializable");
    let payload = Payload::new(Bytes::from_bytes_vec(bytes));
    // A digest must not wait for a connection: the next one is due in a second.
    for peer in peers.filter(|peer| transport.reach(*peer)) {
        let message = Message {
            call: call.clone(),
            payload: payload.clone(),
        };
        let _ = transport.send(peer, group.channel, message, Deadline::after(ROUND));
    }
}
