// Own loop: for servers that must not wait for the proxy to learn of an abort.
package main

import (
	"errors"
	"flag"
	"io"
	"log"
	"net"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/examples/internal/passthrough"
	"github.com/extevict/extevict/extproc"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:9002", "address to serve ext_proc on")
	flag.Parse()
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		log.Fatal(err)
	}
	r := &router{evictor: evictor.New()}
	s := grpc.NewServer()
	extprocpb.RegisterExternalProcessorServer(s, extproc.Handler(r.serve))
	log.Fatal(s.Serve(l))
}

type router struct{ evictor *evictor.Evictor }

func (r *router) serve(st *extproc.Stream) error {
	for {
		req, err := st.RecvOrAbort()
		if e, ok := errors.AsType[*abort.Error](err); ok {
			log.Printf("evicted: %v", e.Reason)
			return nil // whatever it returns: Envoy has its answer
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if req.GetRequestHeaders() != nil {
			r.evictor.TrackRequests(st.Context(), abort.Request{Priority: -1, Endpoint: "10.0.0.7:8000"})
		}
		if err := st.Send(passthrough.Reply(req)); err != nil {
			return err
		}
	}
}
