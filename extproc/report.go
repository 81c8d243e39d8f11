package extproc

import (
	"time"

	"github.com/extevict/extevict/abort"
)

// report is what the observer is going to be told. The stream's bench guards it.
type report struct {
	event    Event
	settled  bool // event has the outcome
	answered bool // event has the answer
	gone     bool // the stream is over
	told     bool
}

func (s *Stream) reportSettled(oc abort.Outcome) {
	if s.report == nil {
		return
	}
	phase := s.own.Handle().Progress().Phase
	s.tell(func(r *report) {
		r.settled = true
		r.event.Outcome, r.event.Phase, r.event.Settled = oc, phase, time.Now()
	})
}

func (s *Stream) reportAnswered(a Answer, err error) {
	if s.report == nil {
		return
	}
	s.tell(func(r *report) {
		r.answered = true
		if r.event.Answer, r.event.Err = a, err; a != AnswerNone {
			r.event.Answered = time.Now()
		}
	})
}

func (s *Stream) reportGone(how error) {
	if s.report == nil {
		return
	}
	s.tell(func(r *report) {
		r.gone = true
		r.event.Ended = time.Now()
	})
}

// tell changes the report, and tells the observer once it is complete.
func (s *Stream) tell(change func(*report)) {
	s.bench.mu.Lock()
	r := s.report
	change(r)
	complete := r.gone && r.settled && (r.answered || r.event.Outcome != abort.Aborted)
	first := complete && !r.told
	r.told = complete
	e := r.event
	s.bench.mu.Unlock()
	if first {
		e.Handle = s.own.Handle()
		var err error
		defer recovered("observer", &err)
		s.opts.observe(e)
	}
}
